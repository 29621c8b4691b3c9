// Small charts drawn here: stacked bars, shares in cells, histograms of a few pixels. They follow the theme by themselves.

const KINDS = [
  { key: "num_text_tokens", name: "Text", hue: "text" },
  { key: "num_image_tokens", name: "Image", hue: "image" },
  { key: "num_other_tokens", name: "Other", hue: "other" },
];

// Segments: [{name, value, hue}]; their label is their name and share.
function stackedBar(segments, whole, unit, size = "") {
  const label = segments.map((s) => `${s.name} ${percent(ratio(s.value, whole))}`).join(", ");
  const bar = el(`div.stack${size}`, { role: "img", "aria-label": label });
  for (const { name, value, hue } of segments) {
    if (!value) continue;
    const title = `${name}: ${exact(value)} ${unit}, ${percent(value / whole)}`;
    bar.append(el(`span.fill-${hue}`, { title, style: { flexGrow: value / whole } }));
  }
  return bar;
}

function legend(segments, whole) {
  return el("ul.legend", null, segments.map(({ name, value, hue }) =>
    el("li", { title: exact(value) }, el(`i.dot.fill-${hue}`), el("span", null, name),
      el("b", null, human(value)), el("small", null, percent(ratio(value, whole))))));
}

const tokenSegments = (numbers) => KINDS.map(({ key, name, hue }) => ({ name, hue, value: numbers[key] }));

function shareCell(share, most, hue, title) {
  if (share === null || share === undefined) return el("span.none", null, "–");
  const width = most ? `${Math.min(100, (100 * share) / most)}%` : "0";
  return el("span.share", { title }, el("span.n", null, percent(share)), el("span.track", null, el(`span.fill-${hue}`, { style: { width } })));
}

// Edges that rise by the same factor, as whole numbers: 1, 2, 3, 4, 5, 6, 8, ...
function logEdges(low, high, numCells) {
  const step = Math.max(Math.log(high / low) / numCells, 0.02);
  const edges = [low];
  for (let at = Math.log(low) + step; edges.at(-1) < high; at += step) {
    const edge = Math.max(edges.at(-1) + 1, Math.round(Math.exp(at)));
    edges.push(edge);
  }
  return edges;
}

// Buckets [low, high, count] put into the cells between `edges`. One that lies across several is shared out by its logarithmic
// width, or cells that hold one bucket more than their neighbours would stand out like a comb. One without neighbours is a value
// of its own, such as the tokens of a tile: it stays whole, in the cell where it begins.
function regroup(buckets, edges) {
  const counts = new Array(edges.length - 1).fill(0);
  const filled = buckets.filter(([, , count]) => count);
  let first = 0;
  for (const [place, [low, high, count]] of filled.entries()) {
    if (low < edges[0]) continue;
    while (first < counts.length - 1 && low >= edges[first + 1]) first += 1;
    if (filled[place - 1]?.[1] !== low && filled[place + 1]?.[0] !== high) {
      counts[first] += count;
      continue;
    }
    const width = Math.log(high / Math.max(low, 0.5));
    for (let cell = first; cell < counts.length && edges[cell] < high; cell += 1) {
      const [from, to] = [Math.max(low, edges[cell]), cell === counts.length - 1 ? high : Math.min(high, edges[cell + 1])];
      counts[cell] += to - from === high - low ? count : (count * Math.log(to / from)) / width;
    }
  }
  return counts.map(Math.round);
}

const domainOf = (distribution) => {
  const buckets = distribution.histogram.filter(([low]) => low >= 1);
  return buckets.length ? [buckets[0][0], Math.max(buckets.at(-1)[1], buckets[0][0] + 1)] : null;
};

// A histogram of a few pixels over a shared logarithmic axis; `marks` are values to draw a line at.
function sparkline(distribution, domain, { width = 120, height = 26, hue = "accent", cells = 40, marks = [], label = "" } = {}) {
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "spark", role: "img", "aria-label": label, preserveAspectRatio: "none" });
  if (!domain || !distribution.count) return picture;
  picture.append(svg("title", {}, label));
  const edges = logEdges(domain[0], domain[1], cells);
  const counts = regroup(distribution.histogram, edges);
  const most = Math.max(...counts, 1);
  const x = (value) => (width * Math.log(value / edges[0])) / Math.log(edges.at(-1) / edges[0]);
  let path = `M0 ${height}`;
  counts.forEach((count, cell) => {
    const top = count ? Math.min(height - 1.2, height - ((height - 2) * count) / most) : height;
    path += `V${top.toFixed(1)}H${x(edges[cell + 1]).toFixed(1)}`;
  });
  picture.append(svg("path", { d: `${path}V${height}Z`, class: `spark-${hue}` }));
  for (const value of marks.filter((mark) => mark > edges[0] && mark < edges.at(-1))) {
    picture.append(svg("line", { x1: x(value), x2: x(value), y1: 0, y2: height, class: "spark-mark" }));
  }
  return picture;
}
