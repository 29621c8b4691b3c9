// Numbers and names as people read them, and the builder of elements: text is only ever set as text, never as markup.

const DATA = unpacked(JSON.parse(document.getElementById("data").textContent));
const byId = (id) => document.getElementById(id);
const UNITS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];

// The reverse of pipelines/report_data.py: histograms as [low, high, count], and what later profiles share with the first.
function unpacked(data) {
  const buckets = (flat) => Array.from({ length: Math.max(0, (flat.length - 1) / 2) }, (_, i) => [flat[2 * i], flat[2 * i + 2], flat[2 * i + 1]]);
  const whole = (numbers, first) => ({ ...first, ...numbers, distributions: { ...first?.distributions, ...numbers.distributions } });
  const everyOne = Object.values(data.profiles).flatMap((profile) => [profile.all, ...Object.values(profile.sources)]);
  for (const one of everyOne.flatMap((numbers) => Object.values(numbers.distributions))) one.histogram = buckets(one.histogram).filter(([, , count]) => count);
  const [first, ...others] = Object.values(data.profiles);
  for (const profile of others) {
    profile.all = whole(profile.all, first.all);
    // defineProperty: a source may be called __proto__
    for (const [name, numbers] of Object.entries(profile.sources)) Object.defineProperty(profile.sources, name, { value: whole(numbers, first.sources[name]) });
  }
  return data;
}

function human(number) {
  if (number === null || number === undefined) return "–";
  if (Math.abs(number) < 1e4) return exact(number);
  for (const [size, unit] of UNITS) {
    if (Math.abs(number) < 0.9995 * size) continue;
    const scaled = number / size;
    return `${scaled < 999.5 ? Number(scaled.toPrecision(3)) : exact(Math.round(scaled))} ${unit}`;
  }
}

function exact(number) {
  if (number === null || number === undefined) return "unknown";
  return number.toLocaleString("en-US", { maximumFractionDigits: Math.abs(number) < 100 ? 2 : 0 });
}

function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let power = 0;
  while (number >= 999.5 && power < units.length - 1) [number, power] = [number / 1000, power + 1];
  return `${power ? Number(number.toPrecision(3)) : number} ${units[power]}`;
}

function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  if (share === 0) return "0 %";
  if (share < 0.0001) return "< 0.01 %";
  if (share < 1 && share > 0.9995) return "> 99.9 %";
  return `${share < 0.01 ? (100 * share).toFixed(2) : (100 * share).toFixed(1)} %`;
}

const ratio = (part, whole) => (whole ? part / whole : null);
const plural = (number, noun) => `${human(number)} ${noun}${number === 1 ? "" : "s"}`;

// Control characters, changes of direction and halves of characters are spelt out, so that no name can disguise itself.
function visible(value) {
  return String(value)
    .replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g, (c) => `\\x${c.charCodeAt(0).toString(16).padStart(2, "0")}`)
    .replace(/[\ud800-\udfff]/gu, (c) => `\\u${c.charCodeAt(0).toString(16)}`)
    .replace(/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (c) => `<U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}>`);
}

const shortened = (name, length) => (name.length > length ? `${name.slice(0, length - 1)}…` : name);

// plotly reads a few tags and entities in its labels.
const forPlotly = (name) => visible(name).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// el("p.lead", {title: "…"}, "text", child, …)
function el(tag, attributes, ...children) {
  const [name, ...classes] = tag.split(".");
  const node = document.createElement(name);
  if (classes.length) node.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(node.style, value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// A number people read, with the exact one for those who ask.
const num = (number, unit = "") => el("span.n", { title: exact(number) + unit }, human(number));
const named = (name) => el("bdi", null, visible(name));
