// The page of the product: asks for an edit, shows it, and tells the gateway what the user did with it.
// Everything that the model says is written as text, never as HTML.
import { sendFeedback } from "/etude-feedback.mjs";

const get = (id) => document.getElementById(id);
const signals = new URL("/signals", location).href; // this server adds the key and the user's name
let answer = null;

get("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  get("send").disabled = true;
  try {
    const given = { wish: get("wish").value, path: get("path").value, file: get("file").value };
    const response = await fetch("/edit", { method: "POST", body: JSON.stringify(given) });
    const found = await response.json();
    if (!response.ok) throw new Error(found.error.message);
    answer = { ...found, before: given.file, decided: false };
    show();
  } catch (error) {
    answer = null;
    say("said", `No answer: ${error.message}`);
    get("diff").replaceChildren();
    get("answer").hidden = false;
    get("choices").hidden = true;
  } finally {
    get("send").disabled = false;
  }
});

function show() {
  const isEdit = answer.kind === "edit" && answer.file !== answer.before;
  say("said", isEdit ? "The agent proposes:" : answer.kind === "question" ? `The agent asks: ${answer.text}` : "The agent's edit could not be carried out.");
  get("diff").replaceChildren(...(isEdit ? difference(answer.before, answer.file) : []));
  get("answer").hidden = false;
  get("choices").hidden = false;
  get("keep").disabled = !isEdit;
  get("revert").disabled = !isEdit;
  say("told", "");
  // No edit is no kept edit. If such answers were left out, it would pay to break every call that may be reverted.
  if (!isEdit) tell({ kept: false });
}

function difference(before, after) {
  const [old, now] = [before.split("\n"), after.split("\n")];
  return now.flatMap((line, i) => (line === old[i] ? [part("", `  ${line}\n`)] : [part("old", `- ${old[i] ?? ""}`), part("new", `+ ${line}`)]));
}

function part(name, text) {
  const made = document.createElement("span");
  made.className = name;
  made.textContent = text;
  return made;
}

get("keep").addEventListener("click", () => decide(true));
get("revert").addEventListener("click", () => decide(false));

function decide(kept) {
  get("keep").disabled = get("revert").disabled = true;
  if (kept) get("file").value = answer.file;
  tell({ kept });
}

for (let stars = 1; stars <= 5; stars += 1) {
  const made = document.createElement("button");
  made.textContent = "★".repeat(stars);
  made.setAttribute("aria-label", `${stars} of 5`);
  made.addEventListener("click", () => tell({ rated: (stars - 1) / 4 }));
  get("stars").append(made);
}

async function tell(values) {
  const { id } = answer;
  const names = Object.keys(values).join(", ");
  say("told", "…");
  try {
    const found = await sendFeedback(signals, "", id, values);
    say("told", `${names}: ${Object.values(found).join(", ")}`);
  } catch (error) {
    say("told", `not sent: ${error.message}`);
  }
}

function say(id, text) {
  get(id).textContent = text;
}
