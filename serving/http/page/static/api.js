// Sends requests to the service. Every failure becomes a Problem with a message for people.

const KEY = "openworld-key";

export const UNREACHABLE = "unreachable";

export const IMAGE_MESSAGES = {
  unsupported_image: "The service cannot read this file. It accepts PNG, JPEG, WebP and BMP images.",
  unsupported_media_type: "The service cannot read this file. It accepts PNG, JPEG, WebP and BMP images.",
  broken_image: "This image file is damaged or incomplete.",
  empty_image: "This file is empty.",
  too_many_bytes: "This file is too large.",
  too_many_pixels: "This image has too many pixels.",
};

const MESSAGES = {
  ...IMAGE_MESSAGES,
  bad_parameter: "The service does not accept this setting.",
  model_failed: "The model failed on this image.",
};

const STATUS_MESSAGES = {
  401: "The service needs an API key.",
  403: "The service does not accept this key.",
  404: "The service has no such address. It may be an older version.",
  408: "The upload took too long.",
  413: "This file is too large.",
  429: "The service is busy right now.",
  503: "The service is busy right now.",
  504: "The service took too long to answer.",
};

export class Problem extends Error {
  constructor(text, { more = "", status = 0, code = "", got = "", allowed = "", retry = false } = {}) {
    super(text);
    this.more = more;
    this.status = status;
    this.code = code;
    this.got = got;
    this.allowed = allowed;
    this.retry = retry;
  }
}

export function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export function storeKey(key) {
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // A browser may forbid storage. The page then asks for the key again.
  }
}

export async function getJson(path) {
  return (await request(path)).json();
}

export async function getBlob(path) {
  return (await request(path)).blob();
}

// Returns the answer for an image, and the milliseconds from sending it until the answer was read.
// Without `store`, the service does not keep the image even if it is unknown.
export async function predict(image, { alpha, task, top, explain, store = true }, signal) {
  const query = new URLSearchParams({ alpha, top });
  if (explain) query.set("explain", explain);
  if (!store) query.set("store", "false");
  if (task !== "") query.set("task", task);
  // The service detects the format from the content. The browser's guess from the file name may be wrong.
  const headers = { "content-type": "application/octet-stream" };
  const started = performance.now();
  const response = await request(`predict?${query}`, { method: "POST", body: image, headers, signal });
  const answer = await response.json();
  return { answer, milliseconds: performance.now() - started };
}

async function request(path, options = {}) {
  const key = storedKey();
  const headers = { ...options.headers, ...(key && { "x-api-key": key }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The service cannot be reached.", {
      more: "It may have stopped, or the network is down.",
      code: UNREACHABLE,
      retry: true,
    });
  }
  if (response.ok) return response;
  throw await problemOf(response);
}

async function problemOf(response) {
  let detail = {};
  try {
    detail = (await response.json()).error ?? {};
  } catch {
    // A proxy in front of the service may not answer with JSON.
  }
  const { status } = response;
  const fallback = status >= 500 ? "The service failed." : "The service did not accept this request.";
  const more = [detail.message, retryHint(response), requestId(response)].filter(Boolean).join(" · ");
  return new Problem(MESSAGES[detail.code] ?? STATUS_MESSAGES[status] ?? fallback, {
    more,
    status,
    code: detail.code ?? "",
    got: detail.got ?? "",
    allowed: detail.allowed ?? "",
    retry: status === 429 || status >= 500 || status === 401,
  });
}

function retryHint(response) {
  const seconds = Number(response.headers.get("retry-after"));
  return seconds > 0 ? `Try again in ${seconds} ${seconds === 1 ? "second" : "seconds"}.` : "";
}

function requestId(response) {
  const id = response.headers.get("x-request-id");
  return id && response.status >= 500 ? `request ${id}` : "";
}
