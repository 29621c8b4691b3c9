// One section per source, filled when it is opened: facts, small multiples over shared axes, sample cards.

const MULTIPLES = [
  ["tokens_per_sample", "Tokens per sample", "accent"],
  ["text_tokens_per_sample", "Text tokens per sample", "text"],
  ["image_tokens_per_image", "Image tokens per image", "image"],
  ["images_per_sample", "Images per sample", "image"],
];
const OPEN_AT_FIRST = 3;

function buildDetails(profile) {
  const wasOpen = new Set([...byId("details-list").children].filter((node) => node.open).map((node) => node.id));
  const isFirst = !byId("details-list").children.length;
  byId("details-list").replaceChildren(...sourcesOf(profile).map(([name, s], place) => {
    const facts = DATA.sources[name] || {};
    const node = el("details.panel", { id: `source-${place}` }, el("summary", null,
      el("span.source-name", null, named(name), facts.failure ? el("span.tag.bad", null, "failed") : el("span.tag", null, visible(facts.schema || ""))),
      el("span.summary-numbers", null, `${plural(s.num_samples, "sample")} · ${plural(s.num_images, "image")} · ${plural(s.num_tokens, "token")}`)));
    node.addEventListener("toggle", () => { if (node.open) fillDetails(node, profile, name, s); });
    if (wasOpen.has(node.id) || (isFirst && place < OPEN_AT_FIRST && sourcesOf(profile).length <= 12)) {
      fillDetails(node, profile, name, s);
      node.open = true;
    }
    return node;
  }));
}

function fillDetails(node, profile, name, s) {
  if (node.querySelector(".details-body")) return;
  const facts = DATA.sources[name] || {};
  node.append(el("div.details-body", null,
    facts.failure ? el("p.failure", null, visible(facts.failure)) : null,
    el("div.multiples", null, MULTIPLES.map(([key, title, hue]) => multiple(s.distributions[key], profile.all.distributions[key], title, hue, profile))),
    factsOf(profile, name, s, facts),
    cardsOf(name)));
}

function multiple(own, whole, title, hue, profile) {
  const domain = domainOf(whole);
  const marks = title === "Tokens per sample" ? profile.sequence_lengths : [];
  const label = own.count ? `${title}: median ${exact(own.quantiles["0.5"])}, 95 % below ${exact(own.quantiles["0.95"])}, largest ${exact(own.max)}` : `${title}: none`;
  const body = own.count
    ? [sparkline(own, domain, { width: 260, height: 56, cells: 60, hue, marks, label }),
      el("p.axis", null, el("span", null, human(domain?.[0] ?? 0)), el("span", null, `median ${human(own.quantiles["0.5"])} · p95 ${human(own.quantiles["0.95"])}`), el("span", null, human(domain?.[1] ?? 0)))]
    : [el("p.quiet.blank", null, "none")];
  return el("figure.multiple", null, el("figcaption", null, title), ...body);
}

function factsOf(profile, name, s, facts) {
  const counts = (object) => {
    const entries = Object.entries(object || {}).sort((a, b) => b[1] - a[1]);
    const shown = entries.slice(0, 6).map(([key, count]) => `${visible(key)} ${human(count)}`).join(", ");
    return entries.length > 6 ? `${shown}, and ${entries.length - 6} more` : shown;
  };
  const weight = facts.weight !== null && facts.weight !== undefined ? `weight ${facts.weight}` : facts.token_share !== null && facts.token_share !== undefined ? `token share ${facts.token_share}` : "";
  const rows = [
    ["Rows", `${exact(s.num_read)} read, ${exact(s.num_written)} written, ${exact(s.num_quarantined)} quarantined`],
    ["Quarantined", counts(s.quarantined_by_reason)],
    ["Not usable", counts(Object.fromEntries(Object.entries(s.status).filter(([key, count]) => key !== "usable" && count)))],
    ["Images", s.num_images ? `${exact(s.num_images)}, stored as ${exact(s.num_images_stored)} files of ${bytes(s.image_bytes_stored)}; ${exact(s.num_duplicates_saved)} duplicates saved` : "none"],
    ["Images left out", counts(s.images_dropped_by_reason)],
    ["Formats", counts(s.formats)], ["Modes", counts(s.modes)],
    ["Turned by EXIF", s.num_images && s.num_images - s.num_upright ? `${exact(s.num_images - s.num_upright)} images` : ""],
    ["Animated", s.num_animated ? `${exact(s.num_animated)} images` : ""],
    ["Check of images (parts)", counts(s.check) || visible(facts.check || "")],
    ["Mixture", [weight, s.mixture?.expected_token_share != null ? `${percent(s.mixture.weight)} of draws, ${percent(s.mixture.expected_token_share)} of tokens, ${percent(s.mixture.share_of_tokens)} of the data` : ""].filter(Boolean).join(", ")],
  ].filter(([, value]) => value);
  return el("div.source-facts", null, el("dl", null, rows.map(([key, value]) => el("div", null, el("dt", null, key), el("dd", null, value)))),
    el("button.more", { type: "button", onclick: () => chooseSource(name) }, "Show in the plots above"));
}

function cardsOf(name) {
  const cards = DATA.cards[name] || [];
  if (!cards.length) return el("p.quiet", null, "No samples to show.");
  return el("div.cards", null, cards.map((shown) => {
    const card = { ...shown, ...(shown.by_profile || {})[state.profile] };
    const other = card.num_tokens - card.num_text_tokens - card.num_image_tokens;
    const segments = [{ name: "Text", value: card.num_text_tokens, hue: "text" }, { name: "Image", value: card.num_image_tokens, hue: "image" }, { name: "Other", value: other, hue: "other" }];
    return el("article.card", null,
      card.thumbnails.length ? el("div.thumbs", null, card.thumbnails.map((thumb, place) => thumbOf(thumb, card.image_tokens?.[place] ?? thumb.num_image_tokens)), card.more_images ? el("span.more-images", null, `+${card.more_images}`) : null) : null,
      el("p.card-text", { dir: "auto" }, visible(card.text) || el("span.quiet", null, "no text")),
      el("div.card-foot", null, stackedBar(segments, card.num_tokens, "tokens", ".thin"),
        el("p", null, el("b", null, exact(card.num_tokens)), ` tokens: ${exact(card.num_text_tokens)} text, ${exact(card.num_image_tokens)} image`, card.num_images ? ` of ${plural(card.num_images, "image")}` : ""),
        el("p.card-id", { title: `${visible(card.part)} line ${card.line}` }, named(card.id))));
  }));
}

function thumbOf(thumb, tokens) {
  const size = `${exact(thumb.width)} × ${exact(thumb.height)}`;
  const title = [size, tokens === null ? null : `${exact(tokens)} tokens`, thumb.title && visible(thumb.title)].filter(Boolean).join(", ");
  const isOurs = typeof thumb.data === "string" && thumb.data.startsWith("data:image/webp;base64,");
  return el("figure", { title }, isOurs ? el("img", { src: thumb.data, alt: title }) : null, el("figcaption", null, size));
}

function openDetails(place) {
  const node = byId(`source-${place}`);
  node.hidden = false;
  node.open = true;
  node.scrollIntoView();
  node.querySelector("summary").focus({ preventScroll: true });
}

function filterDetails(shown, text) {
  [...byId("details-list").children].forEach((node, place) => { node.hidden = !shown.has(place); });
  byId("details-count").textContent = text;
}
