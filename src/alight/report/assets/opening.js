// The first screen: three numbers, the samples along the network, and what is guaranteed.

const decimals = d3.format(".1f");
const points = (share) => decimals(Math.abs(100 * share));
const MUCH = 0.02; // accuracy lost that is shown in red

/** What is known of a point, the most important first: the speed, what it costs in accuracy, what it spends. */
function knownNumbers(point) {
  const {network} = state;
  const speed = point === network.chosen ? network.speed : null;
  const accuracy = {
    label: "Accuracy",
    number: exact(point.accuracy),
    meaning: `on test data${interval(point.accuracy_low, point.accuracy_high, exact)}`,
  };
  const cheaper = {
    label: "Less compute per sample",
    number: `${d3.format(".2f")(1 / point.spent)}×`,
    meaning: `${cost(point.mean_cost, network)} instead of ${cost(network.fullCost, network)}`,
  };
  return [
    ...(speed ? [speedNumber(speed)] : [accuracy]),
    ...(network.full ? [lostNumber(point, network.full)] : speed ? [accuracy] : [cheaper]),
    budgetNumber(point),
  ];
}

function speedNumber(speed) {
  const times = d3.format(".2f");
  const [low, high] = [speed.low, speed.high].map((each) => each ?? NaN);
  const range =
    Number.isFinite(low) && Number.isFinite(high) ? `half of the runs ${times(low)}× to ${times(high)}×` : "";
  const latency =
    speed.latency && speed.full_latency
      ? `one sample ${d3.format(".3~r")(speed.latency)} ms instead of ${d3.format(".3~r")(speed.full_latency)} ms`
      : "";
  const verdict = speed.speedup > 1 ? "" : "early exit is not worth it here: use the full network";
  return {
    label: "Speed-up on this machine",
    number: `${times(speed.speedup)}×`,
    meaning: [verdict, speed.batch_size ? `in batches of ${speed.batch_size}` : "", range, latency]
      .filter(Boolean)
      .join("; "),
    warns: verdict !== "",
  };
}

function lostNumber(point, full) {
  const lost = full.accuracy - point.accuracy;
  const none = points(lost) === "0.0";
  return {
    label: none || lost > 0 ? "Accuracy lost" : "Accuracy gained",
    number: points(lost),
    unit: "points",
    meaning: `${exact(point.accuracy)} instead of ${exact(full.accuracy)} for the full network`,
    warns: lost > MUCH,
  };
}

/** Whether a policy was chosen without a budget: it stands at what it spends. */
function isFree(point) {
  return Math.abs(point.spent - point.allowed) < 1e-9;
}

function budgetNumber(point) {
  const over = point.spent - point.allowed;
  const exceeded = over > 5e-4; // as shown, to a tenth of a point
  const verdict = exceeded ? `exceeded by ${points(over)} points` : "kept";
  const timed = state.network.unit === "ms" ? ", by timed stages" : "";
  return {
    label: isFree(point) ? "Average cost" : exceeded ? "Budget exceeded" : "Budget kept",
    number: exact(point.spent),
    unit: "of full cost",
    meaning: isFree(point)
      ? `${cost(point.mean_cost, state.network)} spent per sample on test data${timed}`
      : `spent on test data, ${percent(point.allowed)} allowed: ${verdict}${timed}`,
    warns: exceeded,
  };
}

function drawNumbers() {
  const point = nearest(state.network, state.method, state.allowed);
  const items = d3
    .select("#numbers")
    .selectAll("li")
    .data(point ? knownNumbers(point) : [])
    .join((enter) => {
      const item = enter.append("li");
      for (const name of ["label", "number", "meaning"]) item.append("p").attr("class", name);
      return item;
    })
    .classed("warns", (each) => each.warns ?? false);
  items.select(".label").text((each) => each.label);
  items.select(".number").text((each) => each.number);
  items
    .filter((each) => each.unit)
    .select(".number")
    .append("small")
    .text((each) => ` ${each.unit}`);
  items.select(".meaning").text((each) => each.meaning);
}

// ---- The line: samples travel along the network, and leave at its exits ----------------------------------------------

const MOST_EXITS = 8; // of the line: others are counted in its last word
const NARROW = 118; // pixels of an exit below which the line stands upright

/** Exits that are open and take samples, at most so many, in their order. */
function busiestExits(point) {
  const open = d3.range(point.exit_shares.length).filter((exit) => {
    const paid = point.exit_costs[exit];
    return point.exit_shares[exit] > 0 || (point.exit_costs.length > 0 && Number.isFinite(paid));
  });
  const last = open.at(-1);
  const busiest = d3.sort(open, (exit) => (exit === last ? -2 : -point.exit_shares[exit])).slice(0, MOST_EXITS);
  return d3.sort(busiest, d3.ascending);
}

/** The walk of the chosen method, or of the first one, whose budget is nearest. */
function nearestWalk() {
  const {examples, fullCost} = state.network;
  if (!examples) return null;
  const of = (method) => examples.walks.filter((walk) => walk.method === method);
  const walks = of(state.method).length ? of(state.method) : of(examples.walks[0].method);
  return d3.least(walks, (walk) => Math.abs(walk.budget / fullCost - state.allowed));
}

function drawLine() {
  const {network} = state;
  const point = nearest(network, state.method, state.allowed);
  find("line-section").hidden = !point?.exit_shares.length;
  if (find("line-section").hidden) return;
  const walk = nearestWalk();
  const exits = busiestExits(point);
  const place = find("line");
  const upright = place.clientWidth / exits.length < NARROW;
  const before = placesOf(place);
  let arriving = 1;
  const stations = exits.map((exit) => {
    const share = point.exit_shares[exit];
    const staying = Math.max(0, arriving - share);
    const station = {exit, share, staying, paid: point.exit_costs[exit]};
    arriving = staying;
    return station;
  });
  d3.select(place).classed("upright", upright).style("--exits", exits.length);
  d3.select(place).selectAll("li.start").data(["all samples"]).join("li").attr("class", "start").text(String);
  d3.select(place)
    .selectAll("li.station")
    .data(stations, (station) => station.exit)
    .join((enter) => {
      const item = enter.append("li").attr("class", "station");
      item.append("h3");
      item.append("p").attr("class", "leave");
      item.append("p").attr("class", "paid");
      item.append("ul").attr("class", "samples");
      return item;
    })
    .order()
    .style("--staying", (station) => station.staying)
    .classed("deserted", (station) => station.share === 0);
  const items = d3.select(place).selectAll("li.station");
  items
    .select("h3")
    .text((station) => network.exitName(station.exit))
    .attr("title", (station) => network.exitName(station.exit));
  items.select(".leave").text((station) => `${exact(station.share)} leave`);
  items
    .select(".paid")
    .text((station) =>
      Number.isFinite(station.paid)
        ? `cost ${percent(station.paid / network.fullCost)}` +
          (network.unit ? `, ${cost(station.paid, network).replace(" ", "\u00a0")}` : "")
        : "",
    );
  drawSamples(items, walk, upright);
  glide(place, before);
  const hidden = point.exit_shares.filter((share, exit) => share > 0 && !exits.includes(exit));
  const others = hidden.length
    ? `${count(hidden.length, "further exit")} ${hidden.length === 1 ? "takes" : "take"} ${exact(d3.sum(hidden))}.`
    : "";
  find("line-how").textContent = [samplesWords(walk), others].filter(Boolean).join(" ");
}

const rightAnswer = ({labels}, walk, index) => !labels.length || labels[index] === walk.answers[index];

/** What became of a sample, in words. */
function answerOf(examples, walk, index) {
  const answer = walk.answers[index];
  return rightAnswer(examples, walk, index) ? answer : `${answer}, wrong: it is ${examples.labels[index]}`;
}

function samplesWords(walk) {
  const {examples, fullCost} = state.network;
  if (!walk) return "The line is as thick as the share of samples still on it.";
  const kind = examples.texts.length ? "texts" : "images";
  const wrong = walk.answers.some((_, index) => !rightAnswer(examples, walk, index));
  const budget = percent(walk.budget / fullCost);
  return `Test ${kind} under ${label(walk.method)} at ${budget}${wrong ? "; red: wrong answer." : "."}`;
}

const PICTURE = 44; // pixels of an image with its gap

const SHORT = 48; // letters of a text that takes one line

/** How many samples stand at an exit: three rows of images or lines of text, a single one where the line is upright. */
function room(station, examples, upright) {
  if (examples.texts.length) return upright ? 1 : examples.texts.every((text) => text.length <= SHORT) ? 3 : 2;
  return Math.max(1, Math.floor((station.clientWidth - (upright ? 36 : 8)) / PICTURE)) * (upright ? 1 : 3);
}

/** Samples at the exit where they left, those that leave early at other budgets first. */
function drawSamples(stations, walk, upright) {
  const {examples} = state.network;
  stations
    .select(".samples")
    .attr("hidden", walk ? null : "")
    .html("");
  if (!walk) return;
  const difficulty = (index) => d3.mean(examples.walks, (each) => each.exits[index]);
  const left = d3.group(
    d3.sort(d3.range(walk.exits.length), difficulty, (index) => index),
    (index) => walk.exits[index],
  );
  stations.each(function ({exit}) {
    const here = left.get(exit) ?? [];
    const most = room(this, examples, upright);
    const shown = here.length > most && !examples.texts.length ? here.slice(0, most - 1) : here.slice(0, most);
    const items = d3
      .select(this)
      .select(".samples")
      .classed("texts", examples.texts.length > 0)
      .selectAll("li")
      .data(shown)
      .join("li")
      .attr("data-index", (index) => index)
      .classed("wrong", (index) => !rightAnswer(examples, walk, index));
    if (examples.texts.length) {
      items.append("q").text((index) => examples.texts[index]);
      items.append("small").text((index) => answerOf(examples, walk, index));
      items.attr("title", (index) => examples.texts[index]);
    } else {
      items
        .append("img")
        .attr("src", (index) => examples.images[index])
        .attr("alt", (index) => answerOf(examples, walk, index))
        .attr("title", (index) => answerOf(examples, walk, index));
      if (shown.length < here.length)
        d3.select(this)
          .select(".samples")
          .append("li")
          .attr("class", "more")
          .text(`+${here.length - shown.length}`);
    }
  });
  offer(
    "examples-csv",
    ["method", "budget", "unit", "example", "exit", "answer", "label"],
    walk.exits.map((exit, index) => [
      walk.method,
      walk.budget,
      state.network.unit,
      index,
      exit,
      walk.answers[index],
      examples.labels[index] ?? "",
    ]),
  );
}

const calmMotion = matchMedia("(prefers-reduced-motion: reduce)");
const samplesIn = (place) => [...place.querySelectorAll("li[data-index]")];
const placesOf = (place) => new Map(samplesIn(place).map((each) => [each.dataset.index, each.getBoundingClientRect()]));

/** Let samples move from where they stood to where they stand now. */
function glide(place, before) {
  if (calmMotion.matches) return;
  for (const item of samplesIn(place)) {
    const [from, to] = [before.get(item.dataset.index), item.getBoundingClientRect()];
    if (!from || (from.x === to.x && from.y === to.y)) continue;
    item.animate([{transform: `translate(${from.x - to.x}px, ${from.y - to.y}px)`}, {transform: "none"}], {
      duration: 260,
      easing: "ease-out",
    });
  }
}

// ---- Guarantees ------------------------------------------------------------------------------------------------------

/** The first sentence as a line that unfolds to the others. */
function folded(guarantee) {
  const [first, ...others] = guarantee.split(/(?<=[.!?])\s+(?=\p{Lu})/u);
  if (!others.length) return Object.assign(document.createElement("p"), {className: "guarantee", textContent: first});
  const details = Object.assign(document.createElement("details"), {className: "guarantee"});
  details.append(
    Object.assign(document.createElement("summary"), {textContent: first}),
    Object.assign(document.createElement("p"), {textContent: others.join(" ")}),
  );
  return details;
}

/** What is known of the cost of new samples where no guarantee is recorded. */
function noGuarantee(point) {
  if (point?.exit_shares.at(-1) === 1) return "Every sample gets the full network, and none costs more than that.";
  if (point && isFree(point))
    return "No guarantee about cost, since no budget was asked for: new samples may spend more than test data did.";
  return (
    "No guarantee is recorded for this policy: new samples may spend more than the budget. " +
    'Calibrate with a contract to get one, such as contract="probability".'
  );
}

function drawGuarantees() {
  const {network} = state;
  const point = nearest(network, state.method, state.allowed);
  const chosen = point && point === network.chosen ? network.guarantees : [];
  const own = point?.guarantee && !chosen.some((each) => each.includes(point.guarantee)) ? [point.guarantee] : [];
  const all = [...own, ...chosen, ...guarantees];
  find("guarantees").replaceChildren(...(all.length ? all : [noGuarantee(point)]).map(folded));
}
