// What `bayplan forecast` predicted, where the report was given it: how full packs get, who waits for whom, what balancing gains.

const plusMinus = (shown, error) => el("span.n", { title: "standard error" }, shown, error === null ? null : el("small", null, ` ± ${error}`));
const share = ({ value, error }, digits = 1) => plusMinus(`${(100 * value).toFixed(digits)} %`, error === null ? null : (100 * error).toFixed(digits));
const times = ({ value, error }) => plusMinus(value.toFixed(3), error === null ? null : error.toFixed(3));
const gained = ({ value, error }) => plusMinus(`${value < 0 ? "" : "+"}${(100 * value).toFixed(1)} %`, error === null ? null : (100 * error).toFixed(1));

const PACKING_HEADS = ["Sequence length", "Full", "No packer above", "Samples a pack", "Images", "Patches", "Size", "Without image", "Encoder's share of work", "Fit no pack"];
const BALANCE_HEADS = ["Ranks x packs", "Tokens", "Order", "Imbalance", "Bound", "Throughput", "", "Packs moved", "off node", "Sent by a rank", "Solver"];

const headsOf = (names, texts) => names.map((name) => ({ name, isText: texts.includes(name) }));

function packingRow(one) {
  const refused = Object.values(one.refused).reduce((sum, count) => sum + count, 0);
  return [exact(one.sequence_length), share(one.efficiency, 3), `${(100 * one.bound.value).toFixed(3)} %`, one.samples_per_pack.value.toFixed(1), one.images_per_pack.value.toFixed(1),
    num(Math.round(one.patches_per_pack.value)), one.pack_bytes ? bytes(Math.round(one.pack_bytes.value)) : "–", percent(one.without_image.value), percent(one.encoder_share.value), num(refused)];
}

function balanceRows(one, most) {
  const setting = `${exact(one.num_ranks)} x ${exact(one.num_microbatches)}`;
  const arrival = [setting, exact(one.sequence_length), "arrival", times(one.arrival), one.bound.value.toFixed(3), "", "", "", "", "", ""];
  const rows = one.modes.map((mode) => {
    const bar = el("span.track.long", null, el("span.fill-accent", { style: { width: `${most ? Math.max(0, (100 * mode.gain.value) / most) : 0}%` } }));
    return ["", "", el("span", null, mode.mode, mode.is_auto ? el("small", null, " auto") : null), times(mode.imbalance), "", gained(mode.gain), bar, percent(mode.moved_share.value), percent(mode.off_node_share.value),
      mode.moved_bytes ? bytes(Math.round(mode.moved_bytes.value / one.num_ranks)) : "–", `${exact(Math.round(1000 * mode.solver_seconds))} ms`];
  });
  return [arrival, ...rows];
}

function showForecasts() {
  const { packing, balance, lines, profile, cost } = DATA.forecast;
  if (!packing) {
    byId("forecast-about").textContent = "None was given. bayplan forecast makes one from the index; bayplan report takes it with --forecast.";
    return;
  }
  byId("forecast-about").textContent = `Profile ${visible(profile)}, costs of ${visible(cost.name)}. Predicted from the index; nothing was trained.`;
  const most = Math.max(...balance.flatMap((one) => one.modes.map((mode) => mode.gain.value)));
  const box = (name, table) => el("div.panel.scroll", { tabindex: "0", role: "region", "aria-label": name }, table);
  byId("forecasts").replaceChildren(
    box("Packing forecast", simpleTable(headsOf(PACKING_HEADS, ["Sequence length"]), packing.map(packingRow))),
    box("Balance forecast", simpleTable(headsOf(BALANCE_HEADS, ["Ranks x packs", "Order", ""]), balance.flatMap((one) => balanceRows(one, most)))),
    el("div.panel.quiet", null, lines.map((line) => el("p", null, visible(line)))),
  );
}
