// Why the service does not answer a file, in words for the person who chose it.

import { Problem, UNREACHABLE } from "./api.js";
import { quoted } from "./elements.js";
import { bytes } from "./upload.js";

const FORMATS = "PNG, JPEG, WebP and BMP";
const PERHAPS_TOO_LARGE = 8e6; // a service that refuses a large file may close the connection before it is sent

// The problem, with the name of the file, what is wrong with it and what to do; other problems as they are.
export function explained(problem, file) {
  if (!(problem instanceof Problem) || !file?.name) return problem;
  const [message, more] = reason(problem, quoted(file.name), file) ?? [];
  return message ? new Problem(message, { ...problem, more }) : problem;
}

function reason(problem, name, file) {
  switch (problem.code) {
    case "unsupported_image":
    case "unsupported_media_type":
      return [
        `The service cannot read this file: ${name} is not an image that it knows.`,
        `It accepts ${FORMATS} images${file.type ? `; the file looks like ${file.type}` : ""}.`,
      ];
    case "too_many_bytes":
      return [
        `${name} is too large: ${bytes(file.size)}.`,
        `The service accepts ${inWords(problem.allowed)}. Save the image smaller, or as JPEG.`,
      ];
    case "too_many_pixels":
      return [
        `${name} has too many pixels.`,
        `It has ${problem.got}; the service accepts ${problem.allowed}. Save it in a smaller size.`,
      ];
    case "broken_image":
      return [`${name} is damaged or incomplete.`, "The file ends too early, or its content is not what it should be."];
    case "empty_image":
      return [`${name} is empty.`, "The file has no content."];
    case UNREACHABLE:
      if (file.size < PERHAPS_TOO_LARGE) return null;
      return [
        `${name} could not be sent: ${bytes(file.size)}.`,
        "It is probably larger than the service accepts; or the service has stopped, or the network is down.",
      ];
    default:
      return null;
  }
}

// "up to 33554432 bytes for this content type" as "up to 33.6 MB".
function inWords(allowed) {
  const count = Number(/\d+/.exec(allowed)?.[0]);
  return count ? `up to ${bytes(count)}` : "smaller files";
}
