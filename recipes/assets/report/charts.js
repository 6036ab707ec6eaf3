// Curves of metrics over steps or versions.

const EDGE = { left: 52, right: 12, top: 24, bottom: 34 };
const TALL = 220;
const DOTTED = 60; // points up to which each gets a dot
const CROWDED = 150; // points beyond which a mean over some of them is drawn too

function chartCard(chart) {
  const last = (values) => values.findLast((value) => value !== null) ?? null;
  const names = chart.series.map((series, i) =>
    key(colour(i), `${series.name} ${withUnit(last(series.values), chart.unit)}`));
  const some = meanOver(chart.x.length);
  const about = node("p", { class: "soft small" }, chart.about, some > 1 ? `; bold: mean of the last ${some}` : "");
  const card = node("section", { class: "card" }, node("h3", {}, chart.title), about, node("div", { class: "legend" }, ...names));
  const box = node("div", { class: "chart" });
  card.append(box);
  onWidth(box, (width) => box.replaceChildren(chartSvg(chart, width)));
  return card;
}

/** How many points one of the bold line is the mean of; 1 draws none. */
function meanOver(points) {
  return points > CROWDED ? Math.ceil(points / 60) : 1;
}

/** Of each point and those before it, `count` in all, the mean of the usable ones; null where the point is not. */
function trailingMean(values, count, usable) {
  let [sum, number] = [0, 0];
  return values.map((value, i) => {
    if (usable(value)) [sum, number] = [sum + value, number + 1];
    const gone = i >= count ? values[i - count] : null;
    if (usable(gone)) [sum, number] = [sum - gone, number - 1];
    return usable(value) ? sum / number : null;
  });
}

/** Lowest and highest value to show, with some room; in powers of ten on a logarithmic axis. */
function extent(values, log) {
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (log) {
    low = Math.floor(Math.log10(low));
    high = Math.ceil(Math.log10(high));
    return high > low ? [low, high] : [low - 1, high + 1];
  }
  const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

function chartSvg(chart, width) {
  const usable = (value) => value !== null && (!chart.log || value > 0);
  const values = chart.series.flatMap((series) => series.values).filter(usable);
  const svg = shape("svg", { height: TALL, viewBox: `0 0 ${width} ${TALL}`, role: "img", "aria-label": chart.title });
  if (!values.length) return svg;
  const [low, high] = extent(values, chart.log);
  const [first, last] = [chart.x[0], chart.x.at(-1)];
  const right = width - EDGE.right;
  const bottom = TALL - EDGE.bottom;
  const x = (at) => (last > first ? EDGE.left + ((at - first) / (last - first)) * (right - EDGE.left) : (EDGE.left + right) / 2);
  const y = (value) => bottom - (((chart.log ? Math.log10(value) : value) - low) / (high - low)) * (bottom - EDGE.top);

  for (const mark of ticks(low, high, 5, chart.log)) {
    const value = chart.log ? 10 ** mark : mark;
    const at = y(value);
    const label = chart.log ? `1e${mark}` : withUnit(value, chart.unit === "share" ? "share" : "");
    svg.append(shape("line", { class: "grid", x1: EDGE.left, x2: right, y1: at, y2: at }));
    svg.append(shape("text", { x: EDGE.left - 6, y: at + 4, "text-anchor": "end" }, label));
  }
  for (const mark of ticks(first, last, Math.max(2, (right - EDGE.left) / 55), true)) {
    svg.append(shape("line", { class: "axis", x1: x(mark), x2: x(mark), y1: bottom, y2: bottom + 4 }));
    const anchor = x(mark) > width - 24 ? "end" : "middle";
    svg.append(shape("text", { x: anchor === "end" ? width - 2 : x(mark), y: bottom + 16, "text-anchor": anchor }, short(mark)));
  }
  svg.append(shape("line", { class: "axis", x1: EDGE.left, x2: right, y1: bottom, y2: bottom }));
  svg.append(shape("text", { x: right, y: bottom + 30, "text-anchor": "end" }, chart.axis));
  svg.append(shape("text", { x: 2, y: 12 }, [chart.unit, chart.log ? "log scale" : ""].filter(Boolean).join(", ")));

  chart.series.forEach((series, i) => svg.append(curve(chart, series, i, x, y, usable)));
  hover(svg, chart, x, width, bottom);
  return svg;
}

/** A line through the values, broken where one is missing, faint if a bold one shows means. */
function curve(chart, series, index, x, y, usable) {
  const count = meanOver(series.values.length);
  const group = shape("g", { class: "series" });
  const dash = index >= COLOURS ? "5 3" : "none";
  const line = (values, kind) => {
    let path = "";
    values.forEach((value, i) => {
      if (!usable(value)) return;
      const [cx, cy] = [x(chart.x[i]).toFixed(1), y(value).toFixed(1)];
      const before = i > 0 && usable(values[i - 1]);
      const alone = !before && !(i + 1 < values.length && usable(values[i + 1]));
      path += `${before ? "L" : "M"}${cx},${cy}`;
      if (alone || values.length <= DOTTED) {
        group.append(shape("circle", { cx, cy, r: alone ? 2.5 : 1.8, fill: colour(index) }));
      }
    });
    group.append(shape("path", { class: kind, d: path, stroke: colour(index), "stroke-dasharray": dash }));
  };
  line(series.values, count > 1 ? "curve faint" : "curve");
  if (count > 1) line(trailingMean(series.values, count, usable), "curve mean");
  return group;
}

function hover(svg, chart, x, width, bottom) {
  const cross = shape("line", { class: "cross", y1: EDGE.top, y2: bottom, visibility: "hidden" });
  svg.append(cross);
  const places = chart.x.map(x);
  svg.addEventListener("pointermove", (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    let near = 0;
    places.forEach((place, i) => { if (Math.abs(place - at) < Math.abs(places[near] - at)) near = i; });
    for (const side of ["x1", "x2"]) cross.setAttribute(side, places[near]);
    cross.setAttribute("visibility", "visible");
    const lines = chart.series.map((series) => `${series.name}: ${withUnit(series.values[near], chart.unit)}`);
    showTip(event, [`${chart.axis} ${chart.x[near]}`, ...lines]);
  });
  svg.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden");
    hideTip();
  });
}
