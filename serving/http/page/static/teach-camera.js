// The camera: pictures become examples, and the model's answer for what it sees now is shown beside them.

import { Problem, getJson, predict } from "./api.js";
import { element, make, percent, quoted } from "./elements.js";
import { fail } from "./notices.js";
import { frame } from "./shrink.js";
import { add, askForLabel, label } from "./teach-examples.js";

const BETWEEN_ANSWERS = 700;
const LOOK_SIDE = 320; // of the short side, for the live answer
const KEPT_SIDE = 768; // of the short side, for an example

const REFUSED = {
  NotAllowedError: "The browser was not allowed to use the camera. Allow it next to the address bar, then try again.",
  NotFoundError: "No camera was found on this device.",
  NotReadableError: "Another program is using the camera.",
};

const video = element("camera-video");
let stream = null;
let timer = 0;
let model = null;

export const cameraIsOpen = () => stream !== null;

export async function openCamera(device = undefined) {
  if (!navigator.mediaDevices?.getUserMedia) {
    const more = "Browsers allow the camera only over HTTPS, or if the server runs on the same device.";
    return fail(new Problem("The camera cannot be used here.", { more }));
  }
  closeCamera();
  const which = device ? { deviceId: { exact: device } } : { facingMode: { ideal: "environment" } };
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { ...which, width: { ideal: 1280 } }, audio: false });
  } catch (error) {
    return fail(new Problem("The camera cannot be used.", { more: REFUSED[error.name] ?? error.message }));
  }
  element("problem").hidden = true;
  video.srcObject = stream;
  element("camera").hidden = false;
  element("drop").hidden = true;
  await video.play();
  await listDevices();
  if (label()) element("camera-take").focus({ preventScroll: true });
  else askForLabel("Type the class first. Then every picture is an example of it.");
  // The class stays in view, above the picture.
  element("bring-form").scrollIntoView({ block: "start" });
  look();
}

async function listDevices() {
  const devices = (await navigator.mediaDevices.enumerateDevices()).filter(({ kind }) => kind === "videoinput");
  const used = stream.getVideoTracks()[0].getSettings().deviceId;
  element("camera-device").replaceChildren(
    ...devices.map(({ deviceId: value, label: text }, at) =>
      make("option", { value, text: text || `Camera ${at + 1}`, selected: value === used }),
    ),
  );
  element("camera-device").hidden = devices.length < 2;
}

export function closeCamera() {
  clearTimeout(timer);
  for (const track of stream?.getTracks() ?? []) track.stop();
  stream = null;
  video.srcObject = null;
  element("camera").hidden = true;
  element("drop").hidden = false;
  element("camera-live").textContent = "";
}

// Asks for one answer after the other, never two at once. These pictures are not kept by the service.
async function look() {
  if (!stream) return;
  const mine = stream;
  try {
    if (!document.hidden && video.videoWidth) {
      model ??= await getJson("model");
      const { answer } = await predict(await frame(video, LOOK_SIDE), { alpha: model.alpha, task: "", top: 1, store: false });
      if (stream === mine) showAnswer(answer);
    }
  } catch (problem) {
    element("camera-live").textContent = "";
    element("camera-text").textContent = `No live answers: ${problem.message}`;
  }
  if (stream === mine) timer = setTimeout(look, BETWEEN_ANSWERS);
}

function showAnswer(answer) {
  const live = element("camera-live");
  live.dataset.known = String(answer.known);
  live.textContent = answer.known ? `${answer.label} · ${percent(answer.confidence)}, if known` : "unknown";
  element("camera-text").textContent = answer.known ? "" : `Best guess: ${quoted(answer.best_guess)}`;
}

export async function takePicture() {
  if (!stream || !video.videoWidth) return;
  const name = label();
  if (!name) return askForLabel("Type the class first. Then every picture is an example of it.");
  const picture = await frame(video, KEPT_SIDE);
  video.classList.add("flash");
  setTimeout(() => video.classList.remove("flash"), 150);
  await add([{ file: picture, label: name }]);
}

element("camera-open").addEventListener("click", () => openCamera());
element("camera-close").addEventListener("click", () => {
  closeCamera();
  element("camera-open").focus();
});
element("camera-take").addEventListener("click", takePicture);
element("camera-device").addEventListener("change", ({ target }) => openCamera(target.value));
