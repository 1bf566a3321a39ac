// What there is to show, read from the page itself, and the numbers as words.

const {networks, spends, columns, guarantees, oracle, singleExit} = JSON.parse(
  document.getElementById("data").textContent,
);
const references = [oracle, singleExit];
const find = (id) => document.getElementById(id);
const label = (method) => (method === singleExit ? "each exit alone" : method);

// JSON has no NaN and no infinities: null, "inf" and "-inf" stand for them.
const words = ["method", "unit", "rule", "guarantee", "worst_class"];
const infinite = {inf: Infinity, "-inf": -Infinity};
const revive = (value, column) => {
  if (Array.isArray(value)) return value.map((each) => revive(each, column));
  if (value === null) return NaN;
  return words.includes(column) ? value : (infinite[value] ?? value);
};

for (const network of networks) {
  const share = (amount) => amount / network.fullCost;
  const read = (row) => {
    const point = Object.fromEntries(columns.map((column, index) => [column, revive(row[index], column)]));
    point.network = network;
    point.allowed = share(point.budget);
    point.spent = share(point.mean_cost);
    point.spentLow = share(point.mean_cost_low);
    point.spentHigh = share(point.mean_cost_high);
    return point;
  };
  network.points = network.points.map(read);
  network.chosen &&= read(network.chosen);
  const grouped = (key) => d3.group(d3.sort(network.points, key), (point) => point.method);
  network.bySpent = grouped((point) => point.spent);
  network.byAllowed = grouped((point) => point.allowed);
  network.several = [...network.bySpent.keys()].filter((method) => !references.includes(method)).length > 1;
  if (network.chosen && !network.bySpent.has(network.chosen.method))
    for (const group of [network.bySpent, network.byAllowed]) group.set(network.chosen.method, [network.chosen]);
  network.alone = network.bySpent.get(singleExit) ?? [];
  network.alone.forEach((point, rank) => {
    point.exit = point.exit_shares.length ? d3.maxIndex(point.exit_shares) : rank;
  });
  network.full = network.alone.length ? d3.greatest(network.alone, (point) => point.exit) : null;
  const all = [...network.points, ...(network.chosen ? [network.chosen] : [])];
  network.numExits = d3.max(all, (point) => point.exit_shares.length);
  network.className = (index) => network.classes[index] ?? `class ${index}`;
  network.exitName = (exit) => network.exits[exit] ?? `exit ${exit + 1}`;
  const budgeted = all.filter((point) => point.method !== singleExit);
  const allowed = d3.sort(budgeted.map((point) => point.allowed));
  network.budgets = allowed.filter((budget, rank) => !rank || budget - allowed[rank - 1] > 1e-6); // the slider's stops
  const smaller = network.smaller ? [share(network.smaller.cost)] : [];
  const amounts = [...all.flatMap((point) => [point.allowed, point.spent]), ...smaller];
  network.range = [Math.floor(d3.min(amounts) * 10) / 10, Math.max(1, d3.max(amounts))];
}

const elsewhere = (point, allowed) => Math.abs(point.allowed - allowed) > 1e-6;

/** The point of a method whose allowed budget is nearest: of the chosen policy itself where that is its own budget. */
function nearest(network, method, allowed) {
  const {chosen} = network;
  if (chosen?.method === method && !elsewhere(chosen, allowed)) return chosen;
  const points = network.byAllowed.get(method) ?? [];
  return d3.least(points, (point) => Math.abs(point.allowed - allowed)) ?? null;
}

// ---- Words and numbers ---------------------------------------------------------------------------------------------

const percent = d3.format(".1~%");
const whole = d3.format(".0%");
const tick = d3.format("~%"); // as many digits as ticks have
/** As alight prints it elsewhere: a tie goes to the even digit, and what is below 100 % is not shown as 100 %. */
const exact = (share) => {
  const hundred = 100 * share;
  let digits = 1;
  let shown = (hundred % 1 === 0.25 ? hundred - 0.05 : hundred).toFixed(1);
  while (share < 1 && Number(shown) === 100 && digits < 9) shown = hundred.toFixed(++digits);
  return `${shown}%`;
};
const signed = (share) => d3.format("+.2~f")(100 * share);
const cost = (value, network) => {
  if (network.unit !== "" && !/^(FLOPs|MACs)$/.test(network.unit)) return `${d3.format(".3~r")(value)} ${network.unit}`;
  const [, digits, prefix] = /^(.*?)([a-zA-Zµ]?)$/.exec(d3.format(value < 1 ? ".3~r" : ".3~s")(value));
  return `${digits} ${prefix.replace("k", "K")}${network.unit}`.trim();
};
const interval = (low, high, format) =>
  Number.isFinite(low) && Number.isFinite(high) ? ` (${format(low)} to ${format(high)})` : "";
const accuracyOf = (point) => `${exact(point.accuracy)}${interval(point.accuracy_low, point.accuracy_high, exact)}`;
const amountOf = (share, value, network) => `${percent(share)}, ${cost(value, network)}`;
const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const thresholdOf = (value) =>
  value === Infinity ? "nobody" : value === -Infinity ? "everyone" : d3.format(".4~f")(value);

const spending = (point) =>
  point.method === singleExit
    ? [`${point.network.exitName(point.exit)} alone`, `spent  ${amountOf(point.spent, point.mean_cost, point.network)}`]
    : [
        label(point.method),
        `allowed  ${amountOf(point.allowed, point.budget, point.network)}`,
        `spent  ${amountOf(point.spent, point.mean_cost, point.network)}`,
      ];
const describe = (point) => [...spending(point), `accuracy  ${accuracyOf(point)}`].join("\n");

/** A name that may wrap after its underscores. */
function breakable(name) {
  const span = document.createElement("span");
  span.append(...name.split(/(?<=_)/).flatMap((part) => [part, document.createElement("wbr")]));
  return span;
}

// ---- Data to take away ---------------------------------------------------------------------------------------------

/** Numbers as Python reads them. */
const cell = (value) => {
  if (Array.isArray(value)) return value.map(cell).join(" ");
  if (typeof value !== "number") return value ?? "";
  return Number.isNaN(value) ? "nan" : Number.isFinite(value) ? value : value > 0 ? "inf" : "-inf";
};

/** Let a link give this table as a CSV file. */
function offer(id, header, rows) {
  const text = d3.csvFormatRows([header, ...rows.map((row) => row.map(cell))]);
  const name = [document.title, state.network.name, find(id).dataset.name]
    .join(" ")
    .toLowerCase()
    .replace(/[^\p{L}\p{N}]+/gu, "-")
    .replace(/^-|-$/g, "");
  d3.select(find(id))
    .attr("download", `${name || "points"}.csv`)
    .attr("href", `data:text/csv;charset=utf-8,${encodeURIComponent(`${text}\n`)}`);
}
const offerPoints = (id, points, names) =>
  offer(
    id,
    names,
    points.map((point) => names.map((name) => point[name])),
  );
