// The first screen: what this dataset is, its totals, what it is made of, and what to look at before training.

const sourcesOf = (profile) => Object.entries(profile.sources);

function showFacts(profile) {
  const { dataset } = DATA;
  const facts = [["Sources", dataset.num_sources]];
  if (profile) facts.push(["Tokenizer", profile.tokenizer], ["Template", profile.template], ["Image rule", profile.image_rule],
    ["Sequence lengths", profile.sequence_lengths.map(exact).join(", ") || "none given"], ["Fingerprint", profile.fingerprint]);
  facts.push(["Written by", `bayplan ${dataset.tool_version}, format ${dataset.format_version}`]);
  byId("facts").replaceChildren(...facts.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", { title: visible(value) }, named(value)))));
}

function tile(name, value, title, ...notes) {
  return el("div.tile", null, el("p.tile-name", null, name), el("p.tile-value", { title }, value), el("p.tile-note", null, ...notes));
}

function showTiles(numbers, length) {
  const over = numbers.over_long.find((entry) => entry.sequence_length === length);
  const rows = numbers.num_read;
  const tiles = [
    tile("Samples", human(numbers.num_samples), exact(numbers.num_samples), `${percent(ratio(numbers.num_usable, numbers.num_samples))} usable`),
    tile("Images", human(numbers.num_images), exact(numbers.num_images), numbers.num_images ? `${bytes(numbers.image_bytes_stored)} in ${plural(numbers.num_images_stored, "file")}` : "none"),
    tile("Tokens", human(numbers.num_tokens), exact(numbers.num_tokens), numbers.num_usable ? `${human(Math.round(numbers.num_tokens / numbers.num_usable))} a sample` : "none"),
    tile("Loss share", percent(ratio(numbers.num_loss_tokens, numbers.num_tokens)), exact(numbers.num_loss_tokens), `${human(numbers.num_loss_tokens)} tokens under loss`),
    tile("Quarantined", percent(ratio(numbers.num_quarantined, rows)), exact(numbers.num_quarantined), `${human(numbers.num_quarantined)} of ${human(rows)} rows`),
  ];
  if (over) tiles.push(tile("Over-long", percent(ratio(over.num_samples, numbers.num_samples)), exact(over.num_samples), `${human(over.num_samples)} beyond ${human(length)} tokens`));
  byId("tiles").replaceChildren(...tiles);
}

function showComposition(numbers) {
  const tokens = tokenSegments(numbers);
  const loss = [{ name: "Under loss", value: numbers.num_loss_tokens, hue: "loss" }, { name: "Context only", value: numbers.num_tokens - numbers.num_loss_tokens, hue: "none" }];
  const samples = [
    { name: "Text only", value: numbers.num_text_only, hue: "text" },
    { name: "Text and images", value: numbers.num_mixed, hue: "mixed" },
    { name: "Images only", value: numbers.num_image_only, hue: "image" },
  ];
  const group = (name, segments, whole, unit) => el("div.made", null, el("h3", null, name), stackedBar(segments, whole, unit), legend(segments, whole));
  byId("composition").replaceChildren(
    group("Tokens by kind", tokens, numbers.num_tokens, "tokens"),
    group("Tokens the loss sees", loss, numbers.num_tokens, "tokens"),
    group("Samples by content", samples, samples.reduce((sum, { value }) => sum + value, 0), "samples"));
}

function mostly(names) {
  const shown = names.slice(0, 3).map(([name, note]) => [named(name), note ? ` (${note})` : ""]);
  const parts = shown.flatMap((part, place) => (place ? [", ", ...part] : part));
  return names.length > 3 ? [...parts, `, and ${names.length - 3} more`] : parts;
}

function findings(profile, numbers, length) {
  const found = [];
  const add = (level, ...text) => found.push(el(`li.${level}`, null, ...text));
  for (const [name, { failure }] of Object.entries(DATA.sources)) {
    if (failure) add("bad", el("strong", null, named(name), " failed: "), visible(failure));
  }
  const own = sourcesOf(profile);
  const refused = own.map(([name, s]) => [name, ratio(s.num_quarantined, s.num_read)]).filter(([, share]) => share > 0.01).sort((a, b) => b[1] - a[1]);
  if (refused.length) add("bad", el("strong", null, `${plural(refused.length, "source")} lost more than 1 % of rows to quarantine: `), ...mostly(refused.map(([name, share]) => [name, percent(share)])), ".");
  const sum = (counts) => Object.values(counts || {}).reduce((total, count) => total + count, 0);
  const dropped = own.map(([name, s]) => [name, sum(s.images_dropped_by_reason)]).filter(([, count]) => count).sort((a, b) => b[1] - a[1]);
  if (dropped.length) add("bad", el("strong", null, `${plural(sum(Object.fromEntries(dropped)), "image")} left out of samples that were kept: `), ...mostly(dropped.map(([name, count]) => [name, human(count)])), ".");
  const uncounted = numbers.num_samples - numbers.num_usable;
  if (uncounted) add("bad", el("strong", null, `${plural(uncounted, "sample")} cannot be counted by this profile: `), Object.entries(numbers.status).filter(([name]) => name !== "usable").map(([name, count]) => `${visible(name)} ${human(count)}`).join(", "), ".");
  const over = numbers.over_long.find((entry) => entry.sequence_length === length);
  if (over && over.num_samples) add("mild", el("strong", null, `${plural(over.num_samples, "sample")} of more than ${exact(length)} tokens `), `hold ${percent(ratio(over.num_tokens, numbers.num_tokens))} of all tokens.`);
  const empty = own.filter(([name, s]) => !s.num_samples && !DATA.sources[name]?.failure).map(([name]) => [name]);
  if (empty.length) add("mild", el("strong", null, empty.length === 1 ? "1 source is empty: " : `${empty.length} sources are empty: `), ...mostly(empty), ".");
  const headers = Object.entries(DATA.sources).filter(([, { check }]) => check === "header").map(([name]) => [name]);
  if (headers.length) add("mild", el("strong", null, "Images checked by their header only: "), ...mostly(headers), ".");
  for (const note of DATA.notes) add("mild", visible(note));
  for (const [name, list] of Object.entries(DATA.excluded.lists || {})) {
    const missed = list.num_ids - list.num_matched;
    add("mild", el("strong", null, `${plural(list.num_rows, "sample")} excluded by `, named(name), "."), missed ? ` ${human(missed)} of its ${human(list.num_ids)} ids name no sample.` : "", " Figures on this page count them; the mixture does not.");
  }
  return found;
}

function showAttention(profile, length) {
  const found = findings(profile, profile.all, length);
  byId("attention").replaceChildren(
    el("h3", null, "Before you train", found.length ? el("small", null, found.length === 1 ? "1 point" : `${found.length} points`) : null),
    found.length ? el("ul.findings", null, found) : el("p.quiet", null, "Nothing stands out: every source was read, little was refused, every sample fits."));
}
