// Which methods there are, which are shown first, and how each looks in every figure: colour, symbol and dash.

// Two of the paper's own and two it is compared with: what can be read at a glance when there are many.
const favourites = ["eero", "eero_marginal", "geometric", "patience"];
const present = new Set(networks.flatMap((network) => [...network.bySpent.keys()]));
const own = [...present].filter((method) => !references.includes(method));
const chosenMethods = networks.flatMap((network) => (network.chosen ? [network.chosen.method] : []));
const first = [...new Set([...chosenMethods, ...favourites])].filter((method) => present.has(method));
const methods = [...first, ...own.filter((method) => !first.includes(method))];
const shown = new Set([...(methods.length <= 6 ? methods : first.length ? first : methods.slice(0, 4)), ...references]);

const symbols = ["circle", "square", "triangle", "diamond", "star", "wye", "hexagon"];
const shapes = {
  circle: d3.symbolCircle,
  square: d3.symbolSquare,
  triangle: d3.symbolTriangle,
  diamond: d3.symbolDiamond,
  star: d3.symbolStar,
  wye: d3.symbolWye,
  times: d3.symbolTimes,
};
const dashes = [null, "7 3", "2 3", "9 3 2 3"];
const looks = new Map(
  methods.map((method, index) => {
    const round = Math.floor(index / 7);
    return [
      method,
      {
        color: `var(--series-${index % 7})`,
        symbol: symbols[(index + round * 3) % 7],
        dash: dashes[round % 4],
        name: `m${index}`,
      },
    ];
  }),
);
looks.set(oracle, {color: "var(--ink)", symbol: null, dash: "5 4", name: "oracle"});
looks.set(singleExit, {color: "var(--ink)", symbol: "times", dash: null, name: "alone"});

const state = {network: networks[0], method: null, allowed: 0.5};

/** Methods that are switched on and have points, those without a budget or others left out. */
const drawn = (...without) =>
  [...methods, ...references].filter(
    (method) => shown.has(method) && !without.includes(method) && state.network.bySpent.has(method),
  );
const named = (chosen) => `${chosen.map(label).join(", ")}${state.network.name && ` on ${state.network.name}`}`;

function swatch({color, symbol, dash, bare}) {
  const svg = d3.create("svg").attr("width", 30).attr("height", 12).attr("aria-hidden", "true");
  if (symbol !== "times" && !bare)
    svg
      .append("line")
      .attr("x2", 30)
      .attr("y1", 6)
      .attr("y2", 6)
      .attr("stroke", color)
      .attr("stroke-width", 1.75)
      .attr("stroke-dasharray", dash);
  if (symbol) {
    const path = shapes[symbol]
      ? d3.symbol(shapes[symbol], 40)()
      : d3
          .line()
          .x((corner) => 4 * Math.sin((corner * Math.PI) / 3))
          .y((corner) => 4 * Math.cos((corner * Math.PI) / 3))(d3.range(7));
    svg
      .append("path")
      .attr("d", path)
      .attr("transform", "translate(15,6)")
      .attr(symbol === "times" ? "stroke" : "fill", color)
      .attr("stroke-width", symbol === "times" ? 1.5 : 0);
  }
  return svg.node();
}

function emphasise(name) {
  d3.selectAll("figure svg .series").classed("faint", function () {
    return name !== null && !this.classList.contains(name);
  });
}
