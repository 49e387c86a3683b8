// The drawing pad. Strokes are stored as points, so that they can be undone and redrawn for a grey model: scaled to fill
// the frame, with a soft line a few of its pixels wide, wherever and however thin they were drawn.

import { contain, soft } from "./picture.js";

const LONG_SIDE = 512;
const LARGEST_ZOOM = 6;
const PEN = 0.08; // of the long side, on the pad
const SENT_PIXELS = 3.2; // of the model, in what is sent
const [THINNEST, THICKEST] = [0.05, 0.2]; // of the long side, in what is sent
const ERASER = 1.6; // times the pen

export class Pad {
  constructor(canvas, { onBegin, onStroke }) {
    this.canvas = canvas;
    this.strokes = [];
    this.image = null;
    this.tool = "pen";
    this.colour = "#ffffff";
    this.onBegin = onBegin;
    this.onStroke = onStroke;
    this.setUp({ height: 1, width: 1, mode: "L" });
    canvas.addEventListener("pointerdown", (event) => this.#begin(event));
    canvas.addEventListener("pointermove", (event) => this.#extend(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => this.#end());
  }

  // Most grey models were trained on light strokes on a dark background. A colour model gets a white background.
  setUp({ height, width, mode }) {
    const scale = LONG_SIDE / Math.max(height, width);
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.grey = mode === "L";
    this.paper = this.grey ? "#000000" : "#ffffff";
    this.size = { width, height };
    const share = SENT_PIXELS / Math.max(height, width);
    this.sent = LONG_SIDE * (this.grey ? Math.min(Math.max(share, THINNEST), THICKEST) : PEN);
    this.#draw();
  }

  get drawn() {
    return this.strokes.length > 0;
  }

  get empty() {
    return !this.drawn && !this.image;
  }

  show(image) {
    this.strokes = [];
    this.image = image;
    this.#draw();
  }

  undo() {
    this.strokes.pop();
    this.#draw();
  }

  clear() {
    this.strokes = [];
    this.image = null;
    this.#draw();
  }

  // The image that is sent for a drawing, as a canvas.
  picture() {
    const canvas = document.createElement("canvas");
    canvas.width = this.canvas.width;
    canvas.height = this.canvas.height;
    const context = canvas.getContext("2d", { willReadFrequently: this.grey });
    paint(context, this.paper, this.strokes, this.grey ? this.#filling() : asIs, this.sent);
    return this.grey ? soft(context, this.size) : canvas;
  }

  #filling() {
    const points = this.strokes.filter((stroke) => stroke.tool === "pen").flatMap((stroke) => stroke.points);
    if (!points.length) return asIs;
    const [left, right] = range(points.map(([x]) => x));
    const [top, bottom] = range(points.map(([, y]) => y));
    const { width, height } = this.canvas;
    const zoom = Math.min(
      (width - this.sent) / Math.max(right - left, 1),
      (height - this.sent) / Math.max(bottom - top, 1),
      LARGEST_ZOOM,
    );
    const middle = [(left + right) / 2, (top + bottom) / 2];
    return ([x, y]) => [width / 2 + (x - middle[0]) * zoom, height / 2 + (y - middle[1]) * zoom];
  }

  #begin(event) {
    if (event.button !== 0 || !event.isPrimary) return;
    event.preventDefault();
    this.canvas.setPointerCapture(event.pointerId);
    if (this.image) this.clear();
    const colour = this.tool === "pen" ? this.colour : this.paper;
    this.current = { tool: this.tool, colour, points: [this.#at(event)] };
    this.strokes.push(this.current);
    this.onBegin();
    this.#draw();
  }

  #extend(event) {
    if (!this.current || !event.isPrimary) return;
    const steps = event.getCoalescedEvents?.() ?? [];
    for (const step of steps.length ? steps : [event]) this.current.points.push(this.#at(step));
    this.#draw();
  }

  #end() {
    if (!this.current) return;
    this.current = null;
    this.onStroke();
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [
      ((event.clientX - box.left) / box.width) * this.canvas.width,
      ((event.clientY - box.top) / box.height) * this.canvas.height,
    ];
  }

  #draw() {
    const context = this.canvas.getContext("2d");
    // Beside an image there is no paper: it would look like a part of the image.
    this.canvas.classList.toggle("photo", Boolean(this.image));
    if (this.image) {
      context.clearRect(0, 0, this.canvas.width, this.canvas.height);
      contain(context, this.image);
    } else {
      paint(context, this.paper, this.strokes, asIs, LONG_SIDE * PEN);
    }
  }
}

const asIs = (point) => point;

function paint(context, paper, strokes, place, thickness) {
  context.fillStyle = paper;
  context.fillRect(0, 0, context.canvas.width, context.canvas.height);
  context.lineCap = context.lineJoin = "round";
  for (const { tool, colour, points } of strokes) {
    context.strokeStyle = colour;
    context.lineWidth = thickness * (tool === "pen" ? 1 : ERASER);
    context.beginPath();
    const placed = points.map(place);
    context.moveTo(...placed[0]);
    // Quadratic curves through the midpoints, with the points as control points: smooth instead of a polygon.
    placed.slice(1).forEach((point, index) => {
      const before = placed[index];
      context.quadraticCurveTo(...before, (before[0] + point[0]) / 2, (before[1] + point[1]) / 2);
    });
    context.lineTo(...placed.at(-1));
    context.stroke();
  }
}

function range(numbers) {
  return [Math.min(...numbers), Math.max(...numbers)];
}
