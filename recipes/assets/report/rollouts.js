// Sample rollouts, token by token.

const UNLIKELY = Math.log(0.1);

function rolloutsCard(rollouts) {
  const steps = [...new Set(rollouts.map((rollout) => rollout.step))];
  const stepChoice = node("select", { "aria-label": "Step" }, ...steps.map((step) => node("option", { value: step }, `step ${step}`)));
  const choice = node("select", { "aria-label": "Rollout" });
  const body = node("div", { id: "rollout" });
  const earlier = node("button", { type: "button", "aria-label": "Previous rollout" }, "←");
  const later = node("button", { type: "button", "aria-label": "Next rollout" }, "→");
  let at = 0;

  function show(index) {
    at = index;
    const step = rollouts[at].step;
    stepChoice.value = step;
    choice.replaceChildren(...rollouts.flatMap((rollout, i) =>
      rollout.step === step ? [node("option", { value: i }, `${rollout.title}, reward ${short(rollout.reward)}`)] : []));
    choice.value = at;
    earlier.disabled = at === 0;
    later.disabled = at === rollouts.length - 1;
    body.replaceChildren(...rolloutBody(rollouts[at]));
  }

  stepChoice.addEventListener("change", () => show(rollouts.findIndex((rollout) => rollout.step === Number(stepChoice.value))));
  choice.addEventListener("change", () => show(Number(choice.value)));
  earlier.addEventListener("click", () => show(at - 1));
  later.addEventListener("click", () => show(at + 1));
  show(rollouts.length - 1);
  return node("section", { class: "card", id: "rollouts" }, node("div", { class: "bar" }, earlier, later, stepChoice, choice), body);
}

function rolloutBody(rollout) {
  const versions = [...new Set(rollout.versions.filter((version) => version >= 0))].sort((a, b) => a - b);
  const paint = new Map(versions.map((version, i) => [version, colour(i)]));
  const parts = rollout.parts.map(([name, value]) => `${name} ${short(value)}`).join(", ");
  const facts = [`row ${rollout.row}`, `reward ${short(rollout.reward)}${parts ? ` (${parts})` : ""}`, `${rollout.drawn} of ${rollout.length} tokens drawn`];
  const legend = node("div", { class: "legend" }, ...versions.map((version) => key(paint.get(version), `version ${version}`)));
  legend.append(node("span", { class: "text" }, node("span", { class: "unlikely" }, "probability below 0.1")));
  const cut = rollout.length > rollout.pieces.length ? [node("p", { class: "soft" }, `The page holds the first ${rollout.pieces.length} tokens.`)] : [];
  return [node("p", { class: "wrap" }, facts.join("  ·  ")), legend, ...rollout.turns.map((turn) => turnBlock(rollout, turn, paint)), ...cut];
}

function turnBlock(rollout, turn, paint) {
  const action = turn.kind === "action";
  const title = action ? `action, ${turn.finish}, reward ${short(turn.reward)}` : turn.kind;
  const text = node("div", { class: "text" });
  for (let t = turn.start; t < turn.end; t += 1) {
    const drawn = rollout.versions[t] >= 0;
    const logprob = rollout.logprobs[t];
    const unlikely = drawn && logprob !== null && logprob < UNLIKELY;
    const span = node("span", { class: `${drawn ? "drawn" : "given"}${unlikely ? " unlikely" : ""}`, "data-t": t }, rollout.pieces[t]);
    if (drawn) span.style.setProperty("--shade", paint.get(rollout.versions[t]));
    text.append(span);
  }
  for (const kind of ["pointermove", "pointerdown"]) {
    text.addEventListener(kind, (event) => {
      const span = event.target.closest("span[data-t]");
      if (span) showTip(event, tokenLines(rollout, Number(span.dataset.t)));
      else hideTip();
    });
  }
  text.addEventListener("pointerleave", hideTip);
  return node("div", { class: `turn ${action ? "action" : "given"}` }, node("div", { class: "soft small" }, title), text);
}

function tokenLines(rollout, t) {
  const lines = [`${JSON.stringify(rollout.pieces[t])}, token ${rollout.tokens[t]} at ${t}`];
  if (rollout.versions[t] < 0) return [...lines, "given, not drawn"];
  const logprob = rollout.logprobs[t];
  lines.push(logprob === null ? "no logprob" : `logprob ${logprob}, probability ${short(Math.exp(logprob))}`);
  return [...lines, `version ${rollout.versions[t]}`];
}
