// What the page says in words and rows: at the chosen budget, exit by exit, at equal spent budget, of a plan.

/** Every switched-on method at the chosen budget, the most accurate first. */
function drawReadout() {
  const points = d3.sort(
    drawn(singleExit).map((method) => nearest(state.network, method, state.allowed)),
    (point) => (point.method === oracle ? 1 : 0),
    (point) => -point.accuracy,
  );
  const best = d3.max(points, (point) => (point.method === oracle ? -1 : Number(point.accuracy.toFixed(3))));
  const table = d3.select("#readout").html("");
  const head = table.append("thead").append("tr");
  for (const title of ["method", "accuracy", "against full", "spent", "of its budget"])
    head.append("th").attr("scope", "col").text(title);
  const rows = table
    .append("tbody")
    .selectAll("tr")
    .data(points)
    .join("tr")
    .attr("class", (point) => (point.method === state.method ? "chosen" : null));
  const names = rows.append("th").attr("scope", "row");
  names
    .append("button")
    .attr("type", "button")
    .attr("class", "name")
    .attr("aria-pressed", (point) => point.method === state.method)
    .attr("data-method", (point) => point.method)
    .attr("title", "show its exits and thresholds")
    .on("click", (event, point) => {
      chooseMethod(point.method);
      find("readout").querySelector("button[aria-pressed='true']")?.focus();
    })
    .each(function (point) {
      this.append(swatch(looks.get(point.method)), breakable(label(point.method)));
    });
  names
    .filter((point) => elsewhere(point, state.allowed))
    .append("small")
    .text((point) => `at ${percent(point.allowed)}, its nearest budget`);
  const accuracy = rows.append("td");
  accuracy
    .append((point) =>
      document.createElement(point.method !== oracle && Number(point.accuracy.toFixed(3)) === best ? "strong" : "span"),
    )
    .text((point) => exact(point.accuracy));
  accuracy.append("small").text((point) => between(point.accuracy_low, point.accuracy_high));
  rows
    .append("td")
    .text((point) => (state.network.full ? `${signedTenths(point.accuracy - state.network.full.accuracy)}` : "–"))
    .filter((point) => point.worst_class !== "")
    .append("small")
    .text((point) => `${point.network.className(point.worst_class)}: ${signedTenths(0 - point.worst_class_loss)}`);
  const spent = rows.append("td").text((point) => exact(point.spent));
  spent.append("small").text((point) => cost(point.mean_cost, state.network));
  rows.append("td").text((point) => exact(point.mean_cost / point.budget));
  if (!points.length) table.append("caption").attr("class", "note").text("No method is switched on.");
  offerPoints("readout-csv", points, figured);
}
const number = d3.format(".1f");
const signedTenths = (share) => d3.format("+.1f")(100 * share);
const between = (low, high) =>
  Number.isFinite(low) && Number.isFinite(high) ? `${number(100 * low)}–${number(100 * high)}` : "";

/** The chosen method at the chosen budget: in a sentence, and exit by exit. */
function fillDetails(point) {
  const table = d3.select("#exits").html("");
  find("rule").textContent = point?.rule ? `${label(point.method)}: ${point.rule}.` : "";
  if (!point) return void find("chosen").replaceChildren();
  find("chosen").textContent =
    `${label(point.method)} with ${amountOf(point.allowed, point.budget, state.network)} allowed: ` +
    `accuracy ${exact(point.accuracy)}, ${exact(point.spent)} spent.`;
  if (point.worst_class !== "" && point.worst_class_loss > 5e-4)
    find("chosen").textContent +=
      ` Of all classes, ${point.network.className(point.worst_class)} loses most against the last exit: ` +
      `${number(100 * point.worst_class_loss)} points, ` +
      `with ${exact(point.worst_class_cost / state.network.fullCost)} spent.`;
  const paid = (value) => (Number.isFinite(value) ? percent(value / state.network.fullCost) : "closed");
  const given = {
    cost: (exit) => (point.exit_costs.length ? paid(point.exit_costs[exit]) : null),
    "leaves at": (exit) => (point.thresholds.length ? thresholdOf(point.thresholds[exit]) : null),
    planned: (exit) => (point.exit_rates.length ? exact(point.exit_rates[exit]) : null),
    observed: (exit) => exact(point.exit_shares[exit]),
  };
  const exits = d3.range(point.exit_shares.length);
  const titles = Object.keys(given).filter((title) => exits.length && given[title](0) !== null);
  const head = table.append("thead").append("tr");
  for (const title of ["exit", ...titles]) head.append("th").attr("scope", "col").text(title);
  const rows = table.append("tbody").selectAll("tr").data(exits).join("tr");
  rows.append("th").attr("scope", "row").text(state.network.exitName);
  for (const title of titles) rows.append("td").text(given[title]);
  const perExit = (values) => (values.length ? (exit) => values[exit] : () => "");
  const [amount, threshold, planned] = [point.exit_costs, point.thresholds, point.exit_rates].map(perExit);
  offer(
    "exits-csv",
    ["method", "budget", "unit", "exit", "cost", "threshold", "planned", "observed"],
    exits.map((exit) => [
      point.method,
      point.budget,
      point.unit,
      exit,
      amount(exit),
      threshold(exit),
      planned(exit),
      point.exit_shares[exit],
    ]),
  );
}

/** The full network beside the planned one. */
function drawPlan() {
  const {plan} = state.network;
  find("plan-section").hidden = !plan;
  if (!plan) return;
  const perSecond = d3.format(",.0f");
  find("plan-title").textContent = plan.pays ? "The plan: early exit is faster here" : "The plan: use the full network";
  find("plan-how").textContent =
    `Measured in batches of ${plan.batchSize}; accuracy on labelled samples that the policy was not fitted to. ` +
    `Open: ${plan.openExits.join(", ")}. ${plan.reason}`;
  const speedup = plan.planned.throughput / plan.full.throughput;
  const figures = [
    ["samples per second", perSecond(plan.full.throughput), perSecond(plan.planned.throughput)],
    ["speed-up", "1", d3.format(".2f")(speedup)],
    ["accuracy", exact(plan.full.accuracy), exact(plan.planned.accuracy)],
  ];
  const table = d3.select("#plan").html("");
  const head = table.append("thead").append("tr");
  for (const title of ["", "full network", "planned"]) head.append("th").attr("scope", "col").text(title);
  const rows = table.append("tbody").selectAll("tr").data(figures).join("tr");
  rows
    .append("th")
    .attr("scope", "row")
    .text((row) => row[0]);
  rows
    .selectAll("td")
    .data((row) => row.slice(1))
    .join("td")
    .text((words) => words);
  const runs = [
    ["full network", plan.full],
    ["planned", plan.planned],
  ].map(([name, each]) => [name, each.throughput, each.accuracy]);
  offer("plan-csv", ["run", "samples_per_second", "accuracy"], runs);
}

/** How far the probabilities of each exit are from its accuracy, where they were recorded. */
function drawCalibration() {
  const exits = d3.sort(
    state.network.alone.filter((point) => Number.isFinite(point.calibration_error)),
    (point) => point.exit,
  );
  find("calibration-part").hidden = !exits.length;
  const table = d3.select("#calibration").html("");
  const head = table.append("thead").append("tr");
  const row = table.append("tbody").append("tr");
  for (const each of [head, row]) each.append("th");
  head.select("th").attr("scope", "col").text("exit");
  row.select("th").attr("scope", "row").text("calibration error, points");
  for (const point of exits) {
    head.append("th").attr("scope", "col").text(state.network.exitName(point.exit));
    row.append("td").text(number(100 * point.calibration_error));
  }
}

/** Every method where it spends the same. */
function drawTable() {
  const table = d3.select("#table").html("");
  const head = table.append("thead").append("tr");
  head.append("th").attr("scope", "col").text("method");
  head.append("th").attr("scope", "col").text("area");
  head.selectAll("th.spend").data(spends).join("th").attr("class", "spend").attr("scope", "col").text(whole);
  const rank = (row) => [...methods, ...references].indexOf(row.method);
  const rows = d3.sort(state.network.table, rank);
  for (const [name, part] of [
    ["", rows.filter((row) => row.method !== oracle)],
    ["reference", rows.filter((row) => row.method === oracle)],
  ]) {
    const body = table.append("tbody").attr("class", name).selectAll("tr").data(part).join("tr");
    body
      .append("th")
      .attr("scope", "row")
      .append((row) => breakable(label(row.method)));
    body.append("td").text((row) => (row.area === null ? "–" : number(100 * row.area)));
    body
      .selectAll("td.spend")
      .data((row) => row.cells)
      .join("td")
      .attr("class", "spend")
      .each(function (cell) {
        const place = d3.select(this);
        if (cell === null) return void place.attr("class", "absent").text("–");
        place.append(cell.best ? "strong" : "span").text(number(100 * cell.accuracy));
        if (cell.low !== null && cell.high !== null) place.append("small").text(between(cell.low, cell.high));
      });
  }
  const cells = rows.flatMap((row) =>
    row.cells.flatMap((cell, index) =>
      cell ? [[row.method, spends[index], cell.accuracy, cell.low ?? NaN, cell.high ?? NaN]] : [],
    ),
  );
  offer("table-csv", ["method", "spent_share_of_full", "accuracy", "accuracy_low", "accuracy_high"], cells);
}
