"use strict";
// What every part of the page uses: elements, numbers, axes and the tooltip. Text gets in as text nodes only.

const COLOURS = 8;
const colour = (index) => `var(--c${index % COLOURS})`;

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function node(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

/** A coloured square and a name. */
function key(paint, name) {
  const square = node("i");
  square.style.background = paint;
  return node("span", {}, square, name);
}

/** A number in at most five characters or so. */
function short(value) {
  if (value === null) return "none";
  const size = Math.abs(value);
  if (size >= 1e9 || (size < 1e-3 && size > 0)) return value.toExponential(1).replace("e+", "e");
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return String(+value.toPrecision(3));
}

function withUnit(value, unit) {
  if (value === null) return "none";
  if (unit === "share") return `${+(value * 100).toPrecision(3)} %`;
  return unit ? `${short(value)} ${unit}` : short(value);
}

/** Seconds, as precise as `span`, the range that is looked at, asks for. */
function clock(seconds, span) {
  const sign = seconds < 0 ? "-" : "";
  const size = Math.abs(seconds);
  if (span < 0.1) return `${(seconds * 1e3).toFixed(span < 0.01 ? 2 : 1)} ms`;
  if (size < 120) return `${seconds.toFixed(span < 2 ? 2 : span < 20 ? 1 : 0)} s`;
  const [hours, minutes, rest] = [Math.floor(size / 3600), Math.floor(size / 60) % 60, size % 60];
  const tail = span < 2 ? rest.toFixed(2).padStart(5, "0") : String(Math.floor(rest)).padStart(2, "0");
  return hours ? `${sign}${hours}:${String(minutes).padStart(2, "0")}:${tail}` : `${sign}${minutes}:${tail} min`;
}

/** Round numbers between low and high, about `count` of them. */
function ticks(low, high, count, whole = false) {
  const raw = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const marks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) marks.push(+(i * step).toPrecision(12));
  return marks;
}

const tip = document.getElementById("tip");

/** Show lines of text beside the pointer, inside the window. */
function showTip(event, lines) {
  tip.replaceChildren(...lines.map((line) => node("div", {}, line)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
  const top = event.clientY + 16 + height > innerHeight ? event.clientY - 12 - height : event.clientY + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip() {
  tip.hidden = true;
}

/** Draw now and whenever the element gets another width. */
function onWidth(element, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (element.clientWidth === width || !element.clientWidth) return;
    width = element.clientWidth;
    draw(width);
  }).observe(element);
}
