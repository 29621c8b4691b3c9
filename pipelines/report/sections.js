// The sections below the table: distributions, mixture, over-long samples, quarantine.

const ASPECTS = [[0.1, "1:10"], [0.25, "1:4"], [0.5, "1:2"], [0.75, "3:4"], [1, "1:1"], [4 / 3, "4:3"], [16 / 9, "16:9"], [3, "3:1"], [5, "5:1"], [10, "10:1"], [20, "20:1"]];
const aspectRange = (low, high) => `${(low / 1000).toFixed(2)} – ${(high / 1000).toFixed(2)}`;

// key: of the distribution; hue: of what is counted.
const FIGURES = [
  { key: "tokens_per_sample", name: "Tokens per sample", hue: "accent", unit: "tokens", thing: "sample", isWide: true, note: "Dashed: the sequence lengths of the profile.", axis: "tokens in a sample" },
  { key: "image_tokens_per_image", name: "Image tokens per image", hue: "image", unit: "tokens", thing: "image", axis: "tokens of an image" },
  { key: "images_per_sample", name: "Images per sample", hue: "image", thing: "sample", isCount: true, axis: "images" },
  { key: "sizes", name: "Width and height", hue: "image", isSizes: true },
  { key: "aspect_ratio", name: "Aspect ratio", hue: "image", unit: "wide for 1 high", thing: "image", axis: "width : height", scale: 1000, show: aspectRange, xaxis: { tickvals: ASPECTS.map(([value]) => value), ticktext: ASPECTS.map(([, name]) => name) } },
  { key: "text_tokens_per_sample", name: "Text tokens per sample", hue: "text", unit: "tokens", thing: "sample", axis: "text tokens in a sample" },
  { key: "patches_per_image", name: "Encoder patches per image", hue: "image", unit: "patches", thing: "image", axis: "patches of an image" },
];

function buildFigures() {
  for (const figure of FIGURES) {
    figure.host = el("div.plot", { "data-name": figure.key, role: "img" });
    figure.strip = el("dl.strip");
    figure.caption = el("p.quiet", null);
    const box = el(`figure.panel${figure.isWide ? ".wide" : ""}`, null, el("figcaption", null, el("h3", null, figure.name), figure.caption), figure.host, figure.strip);
    byId("figures").append(box);
    registerPlot(figure.host, () => figureOf(figure));
  }
}

function figureOf(figure) {
  const { numbers, profile } = current();
  if (figure.isSizes) return sizeFigure(figure.host, numbers.width_height);
  const [own, whole] = [numbers.distributions[figure.key], profile.all.distributions[figure.key]];
  if (figure.isCount) return countFigure(figure.host, own, whole, figure.hue, figure);
  return logFigure(figure.host, own, whole, figure.hue, figure.isWide ? { ...figure, lines: profile.sequence_lengths } : figure);
}

function showFigures() {
  const { numbers, profile } = current();
  const isAll = numbers === profile.all;
  for (const figure of FIGURES) {
    const own = figure.isSizes ? null : numbers.distributions[figure.key];
    const show = (value) => (value === null || value === undefined ? "–" : figure.scale ? (value / figure.scale).toFixed(2) : human(value));
    const cells = own
      ? [["min", own.min], ["p5", own.quantiles?.["0.05"]], ["median", own.quantiles?.["0.5"]], ["p95", own.quantiles?.["0.95"]], ["p99", own.quantiles?.["0.99"]], ["max", own.max], ["mean", own.mean]]
      : [["median width", numbers.distributions.image_width.quantiles?.["0.5"]], ["max width", numbers.distributions.image_width.max], ["median height", numbers.distributions.image_height.quantiles?.["0.5"]], ["max height", numbers.distributions.image_height.max]];
    figure.strip.replaceChildren(...cells.map(([name, value]) => el("div", { title: value === null || value === undefined ? "" : exact(figure.scale ? value / figure.scale : value) }, el("dt", null, name), el("dd", null, show(value)))));
    const zero = own && !figure.isCount ? own.histogram.filter(([low]) => low < 1).reduce((sum, [, , count]) => sum + count, 0) : 0;
    const notes = [figure.note, zero ? `${plural(zero, figure.thing)} with none are not drawn.` : "", isAll || figure.isSizes ? "" : figure.isCount ? "Marks: all sources." : "Dotted: all sources."];
    figure.caption.textContent = notes.filter(Boolean).join(" ") || (figure.isSizes ? "The stronger the colour, the more images. Dotted: squares." : "");
    figure.host.setAttribute("aria-label", `${figure.name}: ${cells.map(([name, value]) => `${name} ${show(value)}`).join(", ")}`);
  }
  redraw(FIGURES.map(({ host }) => host));
}

function showAccuracy(profile) {
  const errors = Object.values(profile.all.distributions).map((one) => one.relative_error).filter((value) => value !== null && value !== undefined);
  const worst = Math.max(0, ...errors);
  byId("accuracy").textContent = "Counts, sums, means, minima and maxima are exact. " + (worst ? `Quantiles and the edges of bars are within ${percent(worst)} of the true value.` : "Quantiles are exact.");
}

let showsAllOfMixture = false;
const MIXTURE_ROWS = 30;

function mixtureRows(profile) {
  const rows = sourcesOf(profile).map(([name, { mixture }]) => [name, mixture?.share_of_tokens ?? 0, mixture?.expected_token_share ?? null]);
  return rows.filter(([, own, drawn]) => own || drawn).sort((a, b) => Math.max(b[1], b[2] ?? 0) - Math.max(a[1], a[2] ?? 0));
}

function showMixture(profile) {
  const rows = mixtureRows(profile);
  const shown = showsAllOfMixture ? rows : rows.slice(0, MIXTURE_ROWS);
  const panel = byId("mixture-panel");
  for (const host of panel.querySelectorAll(".plot")) { watcher.unobserve(host); plots.delete(host); }
  const host = el("div.plot", { "data-name": "mixture", role: "img", "aria-label": `Share of tokens of ${shown.length} sources`, style: { height: `${80 + 23 * Math.max(shown.length, 2)}px` } });
  const more = rows.length > MIXTURE_ROWS
    ? el("button.more", { type: "button", onclick: () => { showsAllOfMixture = !showsAllOfMixture; showMixture(profile); } }, showsAllOfMixture ? `Only the largest ${MIXTURE_ROWS}` : `All ${rows.length} sources`) : null;
  panel.replaceChildren(...[host, more].filter(Boolean));
  registerPlot(host, () => mixtureFigure(host, shown));
}

function simpleTable(heads, rows) {
  const cell = (tag, column, content) => el(heads[column].isText ? tag : `${tag}.num`, tag === "th" ? { scope: "col" } : null, content);
  return el("table", null, el("thead", null, el("tr", null, heads.map((head, column) => cell("th", column, head.name)))),
    el("tbody", null, rows.map((row) => el("tr", null, row.map((content, column) => (column ? cell("td", column, content) : el("th", { scope: "row" }, content)))))));
}

function showOverLong(profile, numbers) {
  if (!numbers.over_long.length) return byId("over-long").replaceChildren(el("p.quiet", null, "This profile names no sequence length."));
  const heads = [{ name: "Sequence length", isText: true }, { name: "Samples" }, { name: "of all" }, { name: "Tokens in them" }, { name: "of all" }];
  const isAll = numbers === profile.all;
  if (isAll) heads.push({ name: "Mostly from", isText: true });
  const rows = numbers.over_long.map((over) => {
    const from = sourcesOf(profile).map(([name, s]) => [name, overOf(s, over.sequence_length)]).filter(([, count]) => count).sort((a, b) => b[1] - a[1]);
    const cells = [exact(over.sequence_length), num(over.num_samples), percent(ratio(over.num_samples, numbers.num_samples)), num(over.num_tokens), percent(ratio(over.num_tokens, numbers.num_tokens))];
    return isAll ? [...cells, el("span.from", null, ...(from.length ? mostly(from.map(([name, count]) => [name, human(count)])) : ["–"]))] : cells;
  });
  byId("over-long").replaceChildren(simpleTable(heads, rows));
}

function showReasons(profile, numbers) {
  const reasons = Object.entries(numbers.quarantined_by_reason).filter(([, count]) => count).sort((a, b) => b[1] - a[1]);
  if (!reasons.length) return byId("reasons").replaceChildren(el("p.quiet", null, "Nothing was quarantined."));
  const isAll = numbers === profile.all;
  const heads = [{ name: "Reason", isText: true }, { name: "Rows" }, { name: "of all read" }, { name: "", isText: true }];
  if (isAll) heads.push({ name: "Mostly from", isText: true });
  const rows = reasons.map(([reason, count]) => {
    const from = sourcesOf(profile).map(([name, s]) => [name, s.quarantined_by_reason[reason] || 0]).filter(([, own]) => own).sort((a, b) => b[1] - a[1]);
    const label = el("span.reason", null, el("code", null, visible(reason)), el("small", null, DATA.reasons[reason] || ""));
    const bar = el("span.track.long", { title: `${exact(count)} rows` }, el("span.fill-alert", { style: { width: `${(100 * count) / reasons[0][1]}%` } }));
    const cells = [label, num(count), percent(ratio(count, numbers.num_read)), bar];
    return isAll ? [...cells, el("span.from", null, ...mostly(from.map(([name, own]) => [name, human(own)])))] : cells;
  });
  byId("reasons").replaceChildren(simpleTable(heads, rows));
}
