// Who worked and who waited: a lane for each role, spans by colour, zoom by wheel or buttons, pan by drag or buttons.

const LANE = { label: 16, bar: 16, room: 8 };
const HEAD = 22;
const NARROW = 4; // pixels
const SHORTEST = 1e-4; // seconds that the whole width shows at most zoom
// Later ones are drawn over earlier ones.
const NAMES = ["wait", "evaluate", "decode", "train", "score", "checkpoint", "stage", "push", "pull", "swap"];
const paintOf = (name) => (NAMES.includes(name) ? `var(--${name})` : "var(--other)");

/** Spans by role, as objects in the order of their begin. */
function byRole(data) {
  const lanes = data.roles.map((role) => ({ role, spans: [] }));
  for (const [role, name, begin, end, version] of data.spans) {
    lanes[role].spans.push({ name: data.names[name], begin, end, version });
  }
  return lanes;
}

/** Seconds of [begin, end] that stretches, ordered by begin, cover together. */
function covered(stretches, begin, end) {
  let total = 0;
  let reached = begin;
  for (const stretch of stretches) {
    const from = Math.max(stretch.begin, reached);
    const to = Math.min(stretch.end, end);
    if (to > from) total += to - from;
    reached = Math.max(reached, to);
  }
  return total;
}

/** Round times: of whole minutes and hours where the range is long. */
function timeTicks(begin, end, count) {
  if (end - begin < 120) return ticks(begin, end, count);
  const step = [1, 2, 5, 10, 15, 30, 60, 120, 240].map((size) => size * 60).find((size) => size >= (end - begin) / count);
  if (!step) return ticks(begin / 3600, end / 3600, count).map((mark) => mark * 3600);
  return ticks(begin / step, end / step, (end - begin) / step, true).map((mark) => mark * step);
}

class Timeline {
  constructor(data) {
    this.data = data;
    this.lanes = byRole(data);
    this.names = [...data.names].sort((a, b) => NAMES.indexOf(a) - NAMES.indexOf(b));
    this.begin = 0;
    this.end = this.length = Math.max(data.end, SHORTEST);
    this.svg = shape("svg", { class: "plot", role: "img", "aria-label": "What each role did over time" });
    this.box = node("div", {}, this.svg);
    this.held = null;
    this.listen();
    this.where = node("span", { class: "soft small", id: "range" });
    onWidth(this.box, (width) => { this.width = width; this.draw(); });
  }

  element() {
    const move = (share) => () => this.show(this.begin + share * (this.end - this.begin), this.end + share * (this.end - this.begin));
    const zoom = (factor) => () => this.zoom((this.begin + this.end) / 2, factor);
    const buttons = [
      ["+", "Zoom in", zoom(0.5)], ["−", "Zoom out", zoom(2)], ["←", "Earlier", move(-0.5)], ["→", "Later", move(0.5)],
      ["All", "The whole run", () => this.show(0, this.length)],
    ].map(([text, label, act]) => {
      const button = node("button", { type: "button", "aria-label": label, title: label }, text);
      button.addEventListener("click", act);
      return button;
    });
    const legend = node("div", { class: "legend" }, ...this.names.map((name) => key(paintOf(name), name)));
    return node("section", { class: "card", id: "timeline" }, legend, node("div", { class: "bar" }, ...buttons, this.where), this.box);
  }

  /** Look at a range, moved into the run and not shorter than what can be drawn. */
  show(begin, end) {
    const length = Math.min(Math.max(end - begin, SHORTEST), this.length);
    this.begin = Math.min(Math.max(0, begin), this.length - length);
    this.end = this.begin + length;
    hideTip();
    this.draw();
  }

  zoom(at, factor) {
    this.show(at - (at - this.begin) * factor, at + (this.end - at) * factor);
  }

  x(seconds) {
    return ((seconds - this.begin) / (this.end - this.begin)) * this.width;
  }

  time(event) {
    const left = this.svg.getBoundingClientRect().left;
    return this.begin + ((event.clientX - left) / this.width) * (this.end - this.begin);
  }

  draw() {
    const range = this.end - this.begin;
    const tall = HEAD + this.lanes.length * (LANE.label + LANE.bar + LANE.room);
    const layer = shape("g");
    for (const hole of this.data.holes) {
      const [from, to] = [Math.max(0, this.x(hole.begin)), Math.min(this.width, this.x(hole.end))];
      if (to > from) layer.append(shape("rect", { class: "hole", x: from, y: 16, width: Math.max(1, to - from), height: tall }));
    }
    for (const mark of timeTicks(this.begin, this.end, Math.max(2, this.width / 90))) {
      const at = this.x(mark);
      const anchor = at < 20 ? "start" : at > this.width - 30 ? "end" : "middle";
      layer.append(shape("line", { class: "grid", x1: at, x2: at, y1: 16, y2: tall }));
      layer.append(shape("text", { x: at, y: 11, "text-anchor": anchor }, clock(mark, range)));
    }
    this.lanes.forEach((lane, i) => this.drawLane(layer, lane, HEAD + i * (LANE.label + LANE.bar + LANE.room)));
    this.where.textContent = `${clock(this.begin, range)} to ${clock(this.end, range)} of ${clock(this.length, this.length)} since the first span`;
    const frame = { height: tall, viewBox: `0 0 ${this.width} ${tall}`, "data-begin": this.begin, "data-end": this.end };
    fill(this.svg, frame, []).replaceChildren(layer);
  }

  drawLane(layer, lane, top) {
    const seen = lane.spans.filter((span) => span.end >= this.begin && span.begin <= this.end);
    const hidden = covered(this.data.holes, this.begin, this.end);
    const shares = this.names
      .map((name) => [name, covered(seen.filter((span) => span.name === name), this.begin, this.end)])
      .filter(([, seconds]) => seconds > 0)
      .sort((a, b) => b[1] - a[1])
      .map(([name, seconds]) => `${name} ${+(Math.min(1, seconds / (this.end - this.begin - hidden)) * 100).toPrecision(2)} %`);
    const text = shape("text", { x: 0, y: top + 11 }, shape("tspan", { class: "strong" }, lane.role), `  ${shares.join(", ")}`);
    layer.append(text, shape("rect", { class: "track", x: 0, y: top + LANE.label, width: this.width, height: LANE.bar }));
    for (const name of this.names) {
      this.drawName(layer, seen.filter((span) => span.name === name), name, top + LANE.label);
    }
  }

  /** Spans of one name; narrow ones that meet others on a pixel are one rectangle, as opaque as they fill it. */
  drawName(layer, spans, name, top) {
    let run = null;
    const flush = () => {
      if (!run) return;
      const wide = Math.max(2, run.to - run.from);
      const busy = run.count > 1 ? Math.min(1, Math.max(0.15, run.filled / wide)) : 1;
      const place = { x: run.from.toFixed(2), y: top, width: wide.toFixed(2), height: LANE.bar };
      layer.append(shape("rect", { class: "span", "data-name": name, ...place, fill: paintOf(name), "fill-opacity": busy.toFixed(2) }));
      const label = run.span.version === null ? name : `${name} v${run.span.version}`;
      if (run.count === 1 && wide > 7 * label.length + 8 && name !== "wait") {
        layer.append(shape("text", { class: "inside", x: run.from + 4, y: top + 12 }, label));
      }
    };
    for (const span of spans) {
      const from = Math.max(0, this.x(span.begin));
      const to = Math.min(this.width, this.x(span.end));
      const narrow = run && Math.min(to - from, run.to - run.from) < NARROW;
      if (narrow && from < Math.max(run.to, run.from + 2)) {
        run.filled += Math.max(0, to - Math.max(from, run.to));
        run.to = Math.max(run.to, to);
        run.count += 1;
      } else {
        flush();
        run = { span, from, to, filled: to - from, count: 1 };
      }
    }
    flush();
  }

  listen() {
    const svg = this.svg;
    svg.addEventListener("wheel", (event) => {
      const out = event.deltaY > 0;
      if (event.deltaX && Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        const share = (event.deltaX / this.width) * (this.end - this.begin);
        this.show(this.begin + share, this.end + share);
      } else if (out && this.end - this.begin >= this.length) {
        return; // all is in view: the page scrolls
      } else {
        this.zoom(this.time(event), out ? 1.25 : 0.8);
      }
      event.preventDefault();
    }, { passive: false });
    svg.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      svg.setPointerCapture(event.pointerId);
      this.held = this.time(event);
      this.tell(event);
    });
    svg.addEventListener("lostpointercapture", () => {
      this.held = null;
      svg.classList.remove("held");
    });
    svg.addEventListener("pointermove", (event) => (this.held === null ? this.tell(event) : this.pan(event)));
    svg.addEventListener("pointerleave", hideTip);
  }

  pan(event) {
    const moved = this.held - this.time(event);
    const slack = this.svg.classList.contains("held") ? 0 : 3; // pixels
    if (Math.abs(moved) * this.width <= slack * (this.end - this.begin)) return;
    this.show(this.begin + moved, this.end + moved);
    this.svg.classList.add("held");
  }

  /** The tooltip: what the lane under the pointer was doing then, within two pixels. */
  tell(event) {
    const lane = this.lanes[Math.floor((event.clientY - this.svg.getBoundingClientRect().top - HEAD) / (LANE.label + LANE.bar + LANE.room))];
    if (!lane) return hideTip();
    const at = this.time(event);
    const range = this.end - this.begin;
    const reach = (2 * range) / this.width;
    const hole = this.data.holes.find((stretch) => stretch.begin <= at && at <= stretch.end);
    const near = lane.spans.filter((span) => span.begin - reach <= at && at <= span.end + reach);
    const lines = near.slice(0, 6).map((span) => {
      const version = span.version === null ? "" : ` version ${span.version}`;
      const length = span.end - span.begin;
      return `${span.name}${version}: ${clock(length, length)}, from ${clock(span.begin, range)}`;
    });
    if (near.length > 6) lines.push(`and ${near.length - 6} more: zoom in`);
    if (hole) lines.push(hole.text);
    showTip(event, [`${lane.role} at ${clock(at, range)}`, ...(lines.length ? lines : ["nothing recorded"])]);
  }
}

function timelineCard(data) {
  return new Timeline(data).element();
}
