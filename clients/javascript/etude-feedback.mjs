/**
 * Sends signals about answers (an edit was kept, an answer was rated) to a gateway of etude. For browsers and Node 18 or
 * later; needs no other file. The guide is docs/guides/feedback.md.
 *
 *     import { sendFeedback } from "./etude-feedback.mjs";
 *     await sendFeedback("https://models.example.org/v1", key, completion.id, { kept: true, rated: 0.8 });
 */

const RETRIED = [408, 429, 500, 502, 503, 504];
const FIRST_MS = 500;
const LONGEST_MS = 30_000;

/** Signals were refused, or could not be sent before the deadline. `status`: the last HTTP status; 0 without one. */
export class FeedbackFailed extends Error {
  constructor(message, status = 0) {
    super(message);
    this.name = "FeedbackFailed";
    this.status = status;
  }
}

/**
 * Send signals about an answer. Each counts once: retries have the same ids.
 *
 * @param {string} baseUrl As for OpenAI's client, such as "http://127.0.0.1:8000/v1".
 * @param {string} key The API key; "" without one. Do not put a key into a web page that others can read.
 * @param {string} responseId The id of the answer.
 * @param {Object<string, boolean|number>} signals Names with values: true, false or a number from 0 to 1.
 * @param {Object} [options]
 * @param {string} [options.user] What the request of the answer had in the header x-etude-user.
 * @param {number} [options.answer] The number of the choice in the response, from 0.
 * @param {number} [options.at] When it happened, Unix time in seconds; default: now.
 * @param {string} [options.signalId] Begins the ids of the signals. Give one of your own, with the same `at`, if the
 *   call itself may be repeated; default: a random one.
 * @param {number} [options.deadlineMs] For this time it tries again, in ms.
 * @returns {Promise<Object<string, string>>} "stored", "duplicate", "over_cap" or "no_consent" for each name.
 * @throws {FeedbackFailed}
 */
export async function sendFeedback(baseUrl, key, responseId, signals, options = {}) {
  const { user = "", answer = 0, at = Date.now() / 1000, signalId = randomId(), deadlineMs = 60_000 } = options;
  const names = Object.keys(signals);
  const body = JSON.stringify({
    signals: names.map((name) => ({
      id: `${signalId}-${name}`,
      response_id: responseId,
      answer,
      name,
      value: signals[name],
      at,
    })),
  });
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  if (user) headers["x-etude-user"] = String.fromCharCode(...new TextEncoder().encode(user)); // UTF-8
  const url = `${baseUrl.replace(/\/+$/, "")}/feedback`;
  const { data } = await answerOf(url, { method: "POST", headers, body }, Date.now() + deadlineMs);
  return Object.fromEntries(names.map((name, i) => [name, data[i].status]));
}

/** Send a request until it is answered, at most until `end` (ms since 1970), and return the JSON of the answer. */
async function answerOf(url, request, end) {
  for (let pauseMs = FIRST_MS; ; pauseMs = Math.min(2 * pauseMs, LONGEST_MS)) {
    let status = 0;
    let retryMs = 0;
    let failure = "";
    try {
      const signal = AbortSignal.timeout(Math.max(100, end - Date.now()));
      const response = await fetch(url, { ...request, signal });
      if (response.ok) return await response.json();
      status = response.status;
      retryMs = retryAfterMs(response.headers.get("retry-after"));
      failure = await messageOf(response);
    } catch (error) {
      failure = String(error?.cause ?? error);
    }
    if (status && !RETRIED.includes(status)) throw new FeedbackFailed(failure, status);
    const waitMs = Math.max(retryMs, pauseMs * (0.5 + Math.random() / 2));
    if (Date.now() + waitMs >= end) {
      throw new FeedbackFailed(`the signals could not be sent before the deadline: ${failure}`, status);
    }
    await new Promise((done) => setTimeout(done, waitMs));
  }
}

/** Return the ms to wait that the header retry-after names, in seconds or as a date; 0 without it. */
function retryAfterMs(told) {
  if (told === null) return 0;
  const ms = Number.isNaN(Number(told)) ? Date.parse(told) - Date.now() : 1000 * Number(told);
  return Math.min(LONGEST_MS, Math.max(0, ms || 0));
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `HTTP status ${response.status}`;
  }
}

/** 32 random hexadecimal characters. (`crypto.randomUUID` exists in secure contexts only.) */
function randomId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
