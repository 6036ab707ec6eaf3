// Puts the page together.

function overviewPart({ overview, notes }) {
  const [done, planned] = overview.steps;
  const state = { done: "done", failed: "failed", stopped: "open" }[overview.state] ?? "open";
  const head = node("p", {}, node("span", { class: `state ${state}` }, overview.state));
  head.append(`, ${done}${planned === null ? "" : ` of ${planned}`} steps. `, node("span", { class: "wrap" }, overview.reason));
  const numbers = overview.numbers.map(([label, text]) =>
    node("div", { class: "number" }, node("b", {}, text), node("span", { class: "soft small" }, label)));
  const changed = overview.changed.map(([name, value, usual]) =>
    node("tr", {}, node("th", {}, name), node("td", {}, value), node("td", { class: "from" }, usual)));
  const summary = overview.summary.map(([name, value]) => node("tr", {}, node("th", {}, name), node("td", {}, value)));
  return [
    node("h1", {}, overview.name),
    head,
    ...notes.map((note) => node("p", { class: "note" }, note)),
    node("div", { class: "numbers" }, ...numbers),
    node("details", { open: "" }, node("summary", {}, "Settings that are not their defaults"), node("table", {}, ...changed)),
    node("details", {}, node("summary", {}, "All settings"), node("pre", {}, overview.config)),
    node("details", {}, node("summary", {}, "Summary"), node("table", {}, ...summary)),
  ];
}

function build() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  page.append(...overviewPart(data));
  if (data.charts.length) {
    page.append(node("h2", {}, "Curves"), node("div", { class: "charts" }, ...data.charts.map(chartCard)));
  }
  if (data.timeline.spans.length) {
    const { spans, total } = data.timeline;
    page.append(node("h2", {}, "Timeline"));
    if (spans.length < total) {
      const text = `${spans.length} of ${total} spans are embedded: the first, the last and whole stretches between; grey is left out.`;
      page.append(node("p", { class: "note" }, text));
    }
    page.append(timelineCard(data.timeline));
  }
  if (data.rollouts.length) page.append(node("h2", {}, "Sample rollouts"), rolloutsCard(data.rollouts));
  page.append(node("p", { class: "soft small" }, `Written ${data.overview.written}.`));
}

build();
