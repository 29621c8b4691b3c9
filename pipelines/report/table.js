// The table of all sources: sorted by any column, filtered by words and by trouble; the details below follow its filter.

const sorting = { column: "tokens", isRising: false };
let tableRows = [];

function overOf(numbers, length) {
  const over = numbers.over_long.find((entry) => entry.sequence_length === length);
  return over ? over.num_samples : null;
}

// value: what a column sorts by; cell: what it shows. `most` holds the largest shares, `domain` the shared axis.
const COLUMNS = [
  { key: "name", name: "Source", isText: true, value: (row) => row.name.toLowerCase(), cell: nameCell },
  { key: "samples", name: "Samples", value: (row) => row.s.num_samples, cell: (row) => num(row.s.num_samples) },
  { key: "images", name: "Images", value: (row) => row.s.num_images, cell: (row) => num(row.s.num_images) },
  { key: "tokens", name: "Tokens", hint: "bar: text, image, other", value: (row) => row.s.num_tokens, cell: (row) => el("span.with-bar", null, num(row.s.num_tokens, " tokens"), stackedBar(tokenSegments(row.s), row.s.num_tokens, "tokens", ".thin")) },
  { key: "loss", name: "Loss", hint: "share of tokens the loss sees", value: (row) => ratio(row.s.num_loss_tokens, row.s.num_tokens), cell: (row) => el("span", { title: exact(row.s.num_loss_tokens) }, percent(ratio(row.s.num_loss_tokens, row.s.num_tokens))) },
  { key: "share", name: "Data share", hint: "share of all tokens", value: (row) => row.s.mixture?.share_of_tokens ?? null, cell: (row, { most }) => shareCell(row.s.mixture?.share_of_tokens, most, "quiet", "share of all tokens") },
  { key: "drawn", name: "Mix share", hint: "share of tokens the recipe's weights will draw", value: (row) => row.s.mixture?.expected_token_share ?? null, cell: (row, { most }) => shareCell(row.s.mixture?.expected_token_share, most, "accent", `weight ${row.s.mixture?.weight ?? "none"}`) },
  { key: "spread", name: "Tokens a sample", hint: "all sources on one logarithmic axis; the line is the sequence length", isText: true, isPlain: true, cell: (row, { domain, length }) => sparkline(row.s.distributions.tokens_per_sample, domain, { width: 104, marks: length ? [length] : [], label: lengthsLabel(row.s) }) },
  { key: "median", name: "Median", value: (row) => quantile(row.s, "0.5"), cell: (row) => num(quantile(row.s, "0.5"), " tokens") },
  { key: "p95", name: "p95", value: (row) => quantile(row.s, "0.95"), cell: (row) => num(quantile(row.s, "0.95"), " tokens") },
  { key: "max", name: "Max", value: (row) => row.s.distributions.tokens_per_sample.max, cell: (row) => num(row.s.distributions.tokens_per_sample.max, " tokens") },
  { key: "over", name: "Over-long", hint: "samples longer than the sequence length", value: (row, length) => overOf(row.s, length), cell: (row, { length }) => trouble(overOf(row.s, length), row.s.num_samples, "mild") },
  { key: "quarantine", name: "Quarantine", value: (row) => ratio(row.s.num_quarantined, row.s.num_read), cell: (row) => trouble(row.s.num_quarantined, row.s.num_read, "bad") },
];

const quantile = (numbers, key) => numbers.distributions.tokens_per_sample.quantiles?.[key] ?? null;
const lengthsLabel = (s) => (s.distributions.tokens_per_sample.count ? `tokens a sample: median ${exact(quantile(s, "0.5"))}, 95 % below ${exact(quantile(s, "0.95"))}, longest ${exact(s.distributions.tokens_per_sample.max)}` : "no samples");

function trouble(count, whole, level) {
  if (!count) return el("span.none", { title: "0" }, count === null ? "–" : "0");
  return el(`span.trouble.${level}`, { title: `${exact(count)} of ${exact(whole)}` }, percent(ratio(count, whole)));
}

function nameCell(row) {
  const facts = DATA.sources[row.name] || {};
  const link = el("a", { href: `#source-${row.place}`, title: visible(row.name), onclick: (event) => { event.preventDefault(); openDetails(row.place); } }, named(row.name));
  return el("span.source-name", null, link, facts.failure ? el("span.tag.bad", { title: visible(facts.failure) }, "failed") : el("span.tag", null, visible(facts.schema || "")));
}

function buildTable(profile, length) {
  tableRows = sourcesOf(profile).map(([name, s], place) => ({ name, s, place, words: words(name, s) }));
  const shares = tableRows.flatMap(({ s }) => [s.mixture?.share_of_tokens ?? 0, s.mixture?.expected_token_share ?? 0]);
  const context = { length, most: Math.max(...shares, 0), domain: domainOf(profile.all.distributions.tokens_per_sample) };
  const table = byId("table");
  table.tHead.replaceChildren(el("tr", null, COLUMNS.map(headerCell)));
  for (const row of tableRows) row.node = tableRow(row, context);
  const total = { name: "All sources", s: { ...profile.all, mixture: null }, place: null };
  const foot = COLUMNS.map((column) => (column.key === "name" ? el("th", { scope: "row" }, "All sources") : el(column.isText ? "td" : "td.num", null, column.cell(total, context))));
  table.tFoot.replaceChildren(el("tr", null, foot));
  sortTable();
  filterTable();
}

const words = (name, s) => visible([name, DATA.sources[name]?.schema, ...Object.keys(s.formats), ...Object.keys(s.quarantined_by_reason)].join(" ")).toLowerCase();

function tableRow(row, context) {
  const cells = COLUMNS.map((column) => {
    if (column.key === "name") return el("th", { scope: "row" }, column.cell(row, context));
    return el(column.isText ? "td" : "td.num", { "data-column": column.key }, column.cell(row, context));
  });
  return el("tr", { "data-place": row.place }, cells);
}

function headerCell(column) {
  const kind = column.isText ? "th" : "th.num";
  if (column.isPlain) return el(kind, { scope: "col", title: column.hint }, el("span.plain", null, column.name));
  const sort = el("button", { type: "button", title: column.hint, onclick: () => sortBy(column.key) }, column.name, el("span.arrow", { "aria-hidden": "true" }));
  return el(kind, { scope: "col", "data-column": column.key, "aria-sort": "none" }, sort);
}

function sortBy(key) {
  const isSame = sorting.column === key;
  sorting.isRising = isSame ? !sorting.isRising : key === "name";
  sorting.column = key;
  sortTable();
}

function sortTable() {
  const column = COLUMNS.find(({ key }) => key === sorting.column);
  const { length } = state;
  const direction = sorting.isRising ? 1 : -1;
  const compare = (a, b) => {
    const [x, y] = [column.value(a, length), column.value(b, length)];
    if (x === y || (x === null && y === null)) return a.place - b.place;
    if (x === null || y === null) return x === null ? 1 : -1; // what is not known comes last in both directions
    return (column.isText ? x.localeCompare(y) : x - y) * direction;
  };
  byId("table").tBodies[0].replaceChildren(...[...tableRows].sort(compare).map(({ node }) => node));
  for (const header of byId("table").tHead.querySelectorAll("[data-column]")) {
    const isSorted = header.dataset.column === sorting.column;
    header.setAttribute("aria-sort", isSorted ? (sorting.isRising ? "ascending" : "descending") : "none");
  }
}

function filterTable() {
  const wanted = byId("filter").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const shown = new Set();
  for (const row of tableRows) {
    const fits = wanted.every((word) => row.words.includes(word))
      && (!byId("only-quarantine").checked || row.s.num_quarantined > 0)
      && (!byId("only-over").checked || overOf(row.s, state.length) > 0);
    row.node.hidden = !fits;
    if (fits) shown.add(row.place);
  }
  const text = shown.size === tableRows.length ? plural(shown.size, "source") : `${shown.size} of ${plural(tableRows.length, "source")}`;
  byId("table-count").textContent = text;
  filterDetails(shown, text);
}
