// "Why?": lays a heat map of the evidence over the photo on the pad.

const element = (id) => document.getElementById(id);

const EXACT = 0.05; // as in serving/bundle/explanation.py

let request = null; // asks the service to explain the answer that is shown
let current = 0; // grows with every answer, so that a late explanation of an earlier one is not shown

// An answer is shown: `content` is its image, and `ask` requests the same answer with an explanation. Without `ask`, as
// for a model that cannot explain, nothing is offered.
export function offerWhy(content, ask) {
  forgetWhy();
  request = ask && { content, ask };
  element("why-box").hidden = !request;
}

export function forgetWhy() {
  current += 1;
  request = null;
  element("why-box").hidden = true;
  hide();
}

function hide() {
  const canvas = element("evidence");
  canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height);
  canvas.hidden = element("why-text").hidden = true;
  element("why").setAttribute("aria-pressed", "false");
}

async function show() {
  const mine = current;
  const { content, ask } = request;
  element("why").setAttribute("aria-busy", "true");
  report("Looking for the evidence …");
  try {
    const [{ answer }, picture] = await Promise.all([ask(), createImageBitmap(content)]);
    const map = await bitmapOf(answer.explanation.png);
    if (mine !== current) return;
    draw(map, picture);
    describe(answer.explanation);
    element("why").setAttribute("aria-pressed", "true");
  } catch (problem) {
    if (mine === current) report(`There is no explanation: ${problem.message}`);
  } finally {
    element("why").removeAttribute("aria-busy");
  }
}

async function bitmapOf(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return createImageBitmap(new Blob([bytes], { type: "image/png" }));
}

// The pad shows the whole photo. The model sees the largest part in its middle that has the model's shape.
function draw(map, picture) {
  const canvas = element("evidence");
  const pad = element("pad");
  canvas.width = pad.width;
  canvas.height = pad.height;
  const zoom = Math.min(canvas.width / picture.width, canvas.height / picture.height);
  const scale = Math.min(picture.width / map.width, picture.height / map.height) * zoom;
  const size = [map.width * scale, map.height * scale];
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(map, (canvas.width - size[0]) / 2, (canvas.height - size[1]) / 2, ...size);
  canvas.hidden = false;
}

function describe({ evidence_for: label, grid, total, remainder }) {
  const flat = grid.flat();
  const best = flat.indexOf(Math.max(...flat));
  const [row, column] = [Math.floor(best / grid[0].length), best % grid[0].length];
  const place = `${third(row, grid.length, ["top", "middle", "bottom"])} ${third(column, grid[0].length, ["left", "centre", "right"])}`;
  const inexact = Math.abs(remainder) > EXACT * Math.abs(total);
  const note = inexact ? " The map is not exact: its parts do not add up to the evidence of the whole image." : "";
  report(`Orange speaks for “${label}”, blue against it. The strongest evidence is at the ${place}.${note}`);
}

const third = (at, count, names) => names[Math.min(2, Math.floor((3 * (at + 0.5)) / count))];

function report(text) {
  element("why-text").textContent = text;
  element("why-text").hidden = false;
}

element("why").addEventListener("click", () => {
  if (element("why").getAttribute("aria-pressed") === "true") hide();
  else if (request) show();
});
