// The map of the quarantine on a canvas: points are drawn once, and moving the pointer only copies that picture.

import { LOOSE, SELECTED, STAMP, mark, outline, stamp, style } from "./map-marks.js";
import { configure, keepSelection, latest, selection, showSelection } from "./unknowns-board.js";
import { thumbnail } from "./unknowns-api.js";

const element = (id) => document.getElementById(id);
const canvas = element("map-canvas");
const context = canvas.getContext("2d");
const points = document.createElement("canvas"); // all points, as they are drawn now
const rings = document.createElement("canvas"); // what is around the selected ones

const NEAR = 10; // pixels
const SETTLED = 150; // milliseconds after the last turn of the wheel
const MOST_IN_LEGEND = 12;
const AGAIN = 2000; // milliseconds until the places of UMAP are asked for again

let map = null;
let view = { x: 0, y: 0, scale: 1 }; // the centre of what is seen, and pixels per unit
let places = new Float32Array(0); // x and y of every item, in pixels
let cells = new Map(); // places by squares of NEAR pixels
let styles = new Map(); // group -> colour and shape
let lasso = null; // the points of the line that is being drawn
let frame = 0;
let drawn = view; // the view that the points were drawn for
let ringed = null; // the view that the rings were drawn for
let settled = 0; // draws them again once zooming has ended
let whole = view; // the view that shows everything; a person who has zoomed sees another one
let stale = false; // whether the images have changed while the map was closed

let asked = 0; // requests so far: an answer that is overtaken by a later one is dropped

async function load() {
  const [turn, method] = [++asked, choice.value];
  const response = await fetch(method === "umap" ? "unknowns/map?method=umap" : "unknowns/map");
  const answer = await response.json().catch(() => null);
  if (turn !== asked) return;
  if (!response.ok || !answer) {
    if (method === "umap") refuseUmap(answer);
    return;
  }
  const moved = map?.version !== answer.version || String(map?.learned[0]) !== String(answer.learned[0]);
  map = answer;
  stale = false;
  keepSelection();
  showSelection();
  if (map.computing) setTimeout(() => turn === asked && load(), AGAIN);
  element("map").hidden = !map.learned.length || !map.items.length;
  if (element("map").hidden) return;
  element("map-method").hidden = !(map.methods ?? []).includes("umap");
  const left = map.left_out;
  const count = left === 1 ? "1 image has" : `${left} images have`;
  const without = left ? `${count} no place: the features are of another model.` : "";
  note(map.computing ? "UMAP computes the places. The first time this takes a minute or more." : without);
  styles = new Map(groupsBySize().map((group, at) => [group, style(at)]));
  showLegend();
  if (!element("map").open || (map.computing && places.length === 2 * map.items.length)) return;
  // Other places need another view; a person who has zoomed in stays there.
  if (moved || view === whole) fit();
  else drawPoints();
}

// A lasso may select images that the board does not show.
configure({ placed: () => map?.items.map(({ id }) => id) ?? [] });

const choice = element("map-method-choice");
const note = (text) => (element("map-note").textContent = text);
choice.addEventListener("change", load);

// The plain map stays.
function refuseUmap(answer) {
  choice.value = "pca";
  note(`There is no map by UMAP: ${answer?.error?.message ?? "the server did not answer"}`);
}

function groupsBySize() {
  const sizes = new Map();
  for (const { group } of map.items) if (group !== null) sizes.set(group, (sizes.get(group) ?? 0) + 1);
  return [...sizes.keys()].sort((one, other) => sizes.get(other) - sizes.get(one) || one - other);
}

const styleOf = (item) => styles.get(item.group) ?? LOOSE;

// ---- drawing

function fit() {
  const xs = [...map.learned.map(([x]) => x), ...map.items.map(({ x }) => x)];
  const ys = [...map.learned.map(([, y]) => y), ...map.items.map(({ y }) => y)];
  const [left, right, top, bottom] = [least(xs), most(xs), least(ys), most(ys)];
  const { width, height } = resize();
  const scale = 0.9 * Math.min(width / Math.max(right - left, 1e-6), height / Math.max(bottom - top, 1e-6));
  view = whole = { x: (left + right) / 2, y: (top + bottom) / 2, scale };
  drawPoints();
}

const least = (numbers) => numbers.reduce((one, other) => Math.min(one, other));
const most = (numbers) => numbers.reduce((one, other) => Math.max(one, other));

// A canvas has as many pixels as the screen shows of it.
function resize() {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    for (const each of [canvas, points, rings]) {
      each.width = Math.round(width * ratio);
      each.height = Math.round(height * ratio);
      each.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
  }
  return { width, height };
}

const across = (x) => (x - view.x) * view.scale + canvas.clientWidth / 2;
const down = (y) => canvas.clientHeight / 2 - (y - view.y) * view.scale;

function drawPoints() {
  clearTimeout(settled);
  drawn = view;
  ringed = null;
  const { width, height } = resize();
  const paint = points.getContext("2d");
  const ink = getComputedStyle(document.body).color;
  paint.clearRect(0, 0, width, height);
  paint.globalAlpha = 0.35;
  paint.fillStyle = ink;
  for (const [x, y] of map.learned) paint.fillRect(across(x) - 1.5, down(y) - 1.5, 3, 3);
  paint.globalAlpha = 0.9;
  places = new Float32Array(2 * map.items.length);
  cells = new Map();
  map.items.forEach((item, at) => {
    const [x, y] = [across(item.x), down(item.y)];
    places[2 * at] = x;
    places[2 * at + 1] = y;
    if (x < -NEAR || y < -NEAR || x > width + NEAR || y > height + NEAR) return;
    const cell = cellOf(x, y);
    if (cells.has(cell)) cells.get(cell).push(at);
    else cells.set(cell, [at]);
    const { colour, shape } = styleOf(item);
    paint.drawImage(stamp(shape, colour || ink), x - STAMP / 2, y - STAMP / 2, STAMP, STAMP);
  });
  paint.globalAlpha = 1;
  nameClasses(paint, ink);
  redraw();
}

// The label of each learned class at the mean of its images, unless another label is in the way.
function nameClasses(paint, ink) {
  const sums = new Map();
  for (const [x, y, classId] of map.learned) {
    const sum = sums.get(classId) ?? [0, 0, 0];
    sums.set(classId, [sum[0] + x, sum[1] + y, sum[2] + 1]);
  }
  paint.font = "600 12px system-ui, sans-serif";
  paint.textAlign = "center";
  paint.fillStyle = ink;
  paint.strokeStyle = getComputedStyle(canvas).backgroundColor;
  paint.lineWidth = 3;
  const taken = [];
  for (const [classId, [x, y, count]] of sums) {
    const half = paint.measureText(map.labels[classId]).width / 2 + 3;
    // Not beyond the edge; names of classes that are out of sight are out of sight, too.
    const middle = across(x / count);
    const beyond = middle < 0 || middle > canvas.clientWidth;
    const at = [beyond ? middle : Math.min(Math.max(middle, half), canvas.clientWidth - half), down(y / count)];
    const covers = ([left, top, other]) => Math.abs(left - at[0]) < half + other && Math.abs(top - at[1]) < 14;
    if (taken.some(covers)) continue;
    taken.push([...at, half]);
    paint.strokeText(map.labels[classId], ...at);
    paint.fillText(map.labels[classId], ...at);
  }
}

function redraw() {
  frame = 0;
  const { clientWidth: width, clientHeight: height } = canvas;
  context.clearRect(0, 0, width, height);
  // While zooming, the picture of before is moved and scaled, which takes no time.
  const zoom = view.scale / drawn.scale;
  const left = width / 2 + (drawn.x - view.x) * view.scale - (width / 2) * zoom;
  const top = height / 2 - (drawn.y - view.y) * view.scale - (height / 2) * zoom;
  context.drawImage(points, left, top, width * zoom, height * zoom);
  if (drawn !== view) return;
  const ink = getComputedStyle(document.body).color;
  if (selection.ids.size) {
    drawRings(width, height, ink);
    context.drawImage(rings, 0, 0, width, height);
  }
  if (!lasso) return;
  context.strokeStyle = ink;
  context.lineWidth = 2;
  context.beginPath();
  outline(context, ...lasso);
  context.globalAlpha = 0.12;
  context.fillStyle = ink;
  context.fill();
  context.globalAlpha = 1;
  context.setLineDash([5, 4]);
  context.stroke();
  context.setLineDash([]);
}

// Around the selected images. While a lasso is drawn, the selection does not change.
function drawRings(width, height, ink) {
  if (lasso && ringed === view) return;
  ringed = view;
  const paint = rings.getContext("2d");
  paint.clearRect(0, 0, width, height);
  const ring = stamp(SELECTED, ink);
  map.items.forEach((item, at) => {
    if (!selection.ids.has(item.id)) return;
    paint.drawImage(ring, places[2 * at] - STAMP / 2, places[2 * at + 1] - STAMP / 2, STAMP, STAMP);
  });
}

const redrawSoon = () => (frame ||= requestAnimationFrame(redraw));

function showLegend() {
  const entries = [...styles].slice(0, MOST_IN_LEGEND).map(([group, { colour, shape }]) => {
    const name = latest?.groups.find(({ id }) => id === group)?.label;
    return legendEntry(shape, colour, name ? `group ${group}: ${name}` : `group ${group}`);
  });
  const more = styles.size - entries.length;
  if (map.items.some(({ group }) => group === null)) entries.push(legendEntry("ring", "", "no group"));
  if (more > 0) entries.push(Object.assign(document.createElement("li"), { textContent: `and ${more} more groups` }));
  element("map-legend").replaceChildren(...entries);
}

function legendEntry(shape, colour, text) {
  const entry = document.createElement("li");
  const swatch = document.createElement("canvas");
  swatch.width = swatch.height = 14;
  mark(swatch.getContext("2d"), shape, 7, 7, colour || getComputedStyle(document.body).color);
  entry.append(swatch, text);
  return entry;
}

// ---- pointer

const cellOf = (x, y) => Math.floor(x / NEAR) * 65536 + Math.floor(y / NEAR);

// The item nearest to a place, within NEAR pixels.
function nearest(x, y) {
  let best = -1;
  let distance = NEAR * NEAR;
  for (const right of [-1, 0, 1]) {
    for (const below of [-1, 0, 1]) {
      for (const at of cells.get(cellOf(x + right * NEAR, y + below * NEAR)) ?? []) {
        const apart = (places[2 * at] - x) ** 2 + (places[2 * at + 1] - y) ** 2;
        if (apart < distance) [best, distance] = [at, apart];
      }
    }
  }
  return best;
}

function showTip(at) {
  const tip = element("map-tip");
  tip.hidden = at < 0;
  if (at < 0) return;
  const item = map.items[at];
  const picture = tip.querySelector("img");
  const address = thumbnail(item.id);
  if (picture.getAttribute("src") !== address) picture.setAttribute("src", address);
  tip.querySelector("figcaption").textContent = item.label ?? (item.group === null ? "no group" : `group ${item.group}`);
  const left = Math.min(places[2 * at] + 12, canvas.clientWidth - 136);
  const top = Math.min(places[2 * at + 1] + 12, canvas.clientHeight - 150);
  tip.style.left = `${Math.max(0, left)}px`;
  tip.style.top = `${Math.max(0, top)}px`;
}

const at = (event) => [event.offsetX, event.offsetY];

canvas.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  canvas.setPointerCapture(event.pointerId);
  lasso = [at(event)];
  showTip(-1);
});

canvas.addEventListener("pointermove", (event) => {
  if (!lasso) return showTip(nearest(...at(event)));
  lasso.push(at(event));
  redrawSoon();
});

canvas.addEventListener("pointerup", (event) => {
  if (!lasso) return;
  const line = lasso;
  lasso = null;
  const moved = most(line.map(([x, y]) => Math.hypot(x - line[0][0], y - line[0][1]))) > NEAR / 2;
  const one = nearest(...line[0]);
  const found = moved ? inside(line) : one >= 0 ? [one] : [];
  if (!event.shiftKey) selection.ids.clear();
  for (const place of found) selection.ids.add(map.items[place].id);
  showSelection();
  redrawSoon();
  // A finger cannot point without touching.
  if (event.pointerType !== "mouse" && found.length === 1) showTip(found[0]);
});

canvas.addEventListener("pointercancel", () => {
  lasso = null;
  redrawSoon();
});
canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && showTip(-1));

// The items within a closed line: a ray to the right crosses it an odd number of times.
function inside(line) {
  const found = [];
  for (let place = 0; place < map.items.length; place++) {
    const [x, y] = [places[2 * place], places[2 * place + 1]];
    let odd = false;
    for (let here = 0, before = line.length - 1; here < line.length; before = here++) {
      const [[x1, y1], [x2, y2]] = [line[here], line[before]];
      if (y1 > y !== y2 > y && x < ((x2 - x1) * (y - y1)) / (y2 - y1) + x1) odd = !odd;
    }
    if (odd) found.push(place);
  }
  return found;
}

canvas.addEventListener(
  "wheel",
  (event) => {
    event.preventDefault();
    const [x, y] = [event.offsetX - canvas.clientWidth / 2, canvas.clientHeight / 2 - event.offsetY];
    const factor = Math.exp(-0.0015 * event.deltaY);
    // What is under the pointer stays there.
    view = {
      x: view.x + (x / view.scale) * (1 - 1 / factor),
      y: view.y + (y / view.scale) * (1 - 1 / factor),
      scale: view.scale * factor,
    };
    showTip(-1);
    redrawSoon();
    clearTimeout(settled);
    settled = setTimeout(drawPoints, SETTLED);
  },
  { passive: false },
);
canvas.addEventListener("dblclick", fit);

element("map").addEventListener("toggle", () => {
  if (!element("map").open || !map) return;
  fit();
  if (stale) load();
});
new ResizeObserver(() => {
  if (map && element("map").open && canvas.clientWidth) drawPoints();
}).observe(canvas);

// The groups below are shown again after every change; the map follows them.
let waiting = 0;
new MutationObserver(() => {
  clearTimeout(waiting);
  const seen = !map || element("map").hidden || element("map").open;
  if (seen) waiting = setTimeout(load, 200);
  else stale = true;
}).observe(element("groups"), { childList: true });
new MutationObserver(() => map && element("map").open && redrawSoon()).observe(element("bar"), {
  attributes: true,
  childList: true,
  subtree: true,
});
