// What is chosen (profile, source, sequence length, theme) and what changes with it.

const profiles = Object.entries(DATA.profiles);
const state = { profile: profiles.length ? profiles[0][0] : null, source: null, length: null };

function current() {
  const profile = DATA.profiles[state.profile];
  return { profile, numbers: state.source === null ? profile.all : profile.sources[state.source] };
}

const option = (value, text) => el("option", { value, title: text }, shortened(text, 60));

// Options carry places, not names: a name may hold anything.
function fillSelects() {
  const { profile } = current();
  const names = sourcesOf(profile).map(([name]) => name);
  if (!names.includes(state.source)) state.source = null;
  byId("source").replaceChildren(option("all", `All ${names.length} sources`), ...names.map((name, place) => option(String(place), visible(name))));
  byId("source").value = state.source === null ? "all" : String(names.indexOf(state.source));
  if (!profile.sequence_lengths.includes(state.length)) state.length = profile.sequence_lengths[0] ?? null;
  byId("length").replaceChildren(...profile.sequence_lengths.map((length) => option(String(length), exact(length))));
  byId("length-pick").hidden = profile.sequence_lengths.length < 2;
  byId("length").value = String(state.length);
}

function showProfile() {
  const { profile } = current();
  fillSelects();
  showFacts(profile);
  showAccuracy(profile);
  buildDetails(profile);
  showLength();
  showMixture(profile);
  showForecasts();
  showSource();
}

function showLength() {
  const { profile, numbers } = current();
  buildTable(profile, state.length);
  showTiles(numbers, state.length);
  showAttention(profile, state.length);
}

function showSource() {
  const { profile, numbers } = current();
  showTiles(numbers, state.length);
  showComposition(numbers);
  showFigures();
  showOverLong(profile, numbers);
  showReasons(profile, numbers);
  for (const scope of document.querySelectorAll(".scope")) {
    scope.replaceChildren(...(state.source === null ? [] : [named(shortened(visible(state.source), 48)), el("button", { type: "button", "aria-label": "Show all sources", title: "Show all sources", onclick: () => chooseSource(null) }, "×")]));
  }
}

function chooseSource(name) {
  state.source = name;
  fillSelects();
  showSource();
  if (name !== null) byId("distributions").scrollIntoView();
}

// The page follows the system until the button says otherwise.
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : systemIsDark.matches);

function showTheme() {
  byId("theme").setAttribute("aria-pressed", String(isDark()));
  redraw();
}

// Paper is light and as wide as itself; what was not yet in view is drawn first.
let themeBefore;
function beforePrint() {
  if (document.documentElement.classList.contains("printing")) return;
  themeBefore = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  document.documentElement.classList.add("printing");
  for (const host of plots.keys()) { markStale(host); drawIfStale(host); if (host.dataset.drawn) plotly().Plots.resize(host); }
}

function afterPrint() {
  if (!document.documentElement.classList.contains("printing")) return;
  document.documentElement.classList.remove("printing");
  if (themeBefore === undefined) delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = themeBefore;
  for (const host of plots.keys()) if (host.dataset.drawn) plotly().Plots.resize(host);
  redraw();
}

function start() {
  byId("profile").replaceChildren(...profiles.map(([name], place) => option(String(place), visible(name))));
  byId("profile-pick").hidden = profiles.length < 2;
  byId("profile").addEventListener("change", (event) => { state.profile = profiles[Number(event.target.value)][0]; showProfile(); });
  byId("source").addEventListener("change", (event) => {
    state.source = event.target.value === "all" ? null : sourcesOf(current().profile)[Number(event.target.value)][0];
    showSource();
  });
  byId("length").addEventListener("change", (event) => { state.length = Number(event.target.value); showLength(); });
  for (const id of ["filter", "only-quarantine", "only-over"]) byId(id).addEventListener("input", filterTable);
  byId("theme").addEventListener("click", () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; showTheme(); });
  systemIsDark.addEventListener("change", showTheme);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a telephone's address bar comes and goes
    width = innerWidth;
    requestAnimationFrame(() => redraw());
  });
  addEventListener("beforeprint", beforePrint);
  addEventListener("afterprint", afterPrint);
  matchMedia("print").addEventListener("change", ({ matches }) => (matches ? beforePrint() : afterPrint()));
  document.addEventListener("DOMContentLoaded", () => redraw());
  byId("foot-text").textContent = "This page holds everything it shows and asks no network for anything. The same numbers, for machines, are in report.json.";
  buildFigures();
  showProfile();
  byId("theme").setAttribute("aria-pressed", String(isDark()));
}

document.body.classList.remove("unfilled");
if (profiles.length) start();
else {
  for (const section of document.querySelectorAll("main > section, .controls")) section.hidden = true;
  showFacts(null);
  byId("facts").after(el("p.panel.quiet", null, "No profile is indexed yet, so there is nothing to count."));
}
