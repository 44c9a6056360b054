// Writes a text twice, with drafts and without, and shows what each call of the model added.

const METHODS = ["lookup", "jacobi", "jacobi+lookup"];
const EXAMPLES = {
  chat: [
    "Write a Python class for a stack with push, pop and peek, and then a queue with the same style.",
    "List the months of the year, each with the number of its days.",
    "Why is the sky blue? Explain it to a child.",
  ],
  fill: ["def add(a, b):\n    [[…]]\n\nprint(add(2, 3))\n", "for name in names:\n    [[…]]\n    print(greeting)\n"],
};
const STORIES = [
  "Once upon a time there was a [[6]]. She liked to [[…]]. One day she found a [[4]] in the garden.",
  "Tom was sad because [[12]]. His mother said, \"[[…]]\" Then they went home.",
];
const HOLE = /\[\[\s*(…|\.\.\.|\d+)\s*\]\]/;
const POLL_MILLISECONDS = 2000;

const $ = (id) => document.getElementById(id);
let mode = "chat", model = "", severalHoles = false, running = null;

class Wrong extends Error {}

function headers() {
  const key = sessionStorage.getItem("key");
  return {"content-type": "application/json", ...(key ? {authorization: `Bearer ${key}`} : {})};
}

async function request(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, {...options, headers: headers()});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Wrong("The server does not answer; is saltus serve still running?");
  }
  if (answer.ok) return answer;
  if (answer.status === 401) {
    $("key-field").hidden = false;
    $("key").focus();
    throw new Wrong("This server asks for an API key; enter it above.");
  }
  const body = await answer.json().catch(() => null);
  throw new Wrong(body?.error?.message ?? `The server answers ${answer.status}.`);
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    text += value;
    const lines = text.split("\n\n");
    text = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.replace(/^data: /, ""));
      if (event.error) throw new Wrong(event.error.message);
      yield event;
    }
  }
}

function settings(drafts) {
  const method = $("method").value;
  return {
    model, stream: true, include_metrics: true, seed: Number($("seed").value), temperature: Number($("temperature").value),
    speculative: drafts ? (method ? {method} : true) : false,
  };
}

function question(drafts) {
  const text = $("prompt").value;
  if (mode === "chat") {
    return ["v1/chat/completions", {
      ...settings(drafts), messages: [{role: "user", content: text}], max_tokens: Number($("tokens").value),
      reasoning_format: "none", // the text as it is
    }];
  }
  const [parts, hole_lengths] = withHoles(text);
  if (parts.length < 2) throw new Wrong("Mark a hole in the text with [[…]], or [[8]] for one of 8 tokens.");
  const limit = severalHoles ? {} : {n_predict: Number($("tokens").value)};
  return ["infill", {...settings(drafts), parts, hole_lengths, ...limit}];
}

/** The texts around the holes, and the holes' lengths. Tokens of words begin with the space before them. */
function withHoles(text) {
  const found = text.split(HOLE);
  const parts = found.filter((_, place) => place % 2 === 0);
  const lengths = found.filter((_, place) => place % 2 === 1).map((mark) => /\d/.test(mark) ? Number(mark) : null);
  const before = parts.slice(0, -1).map((part) => severalHoles ? part.replace(/(\S) $/, "$1") : part);
  return [[...before, parts.at(-1)], lengths];
}

/** Write the text into a box; returns the text and its figures. */
async function write(box, figures, drafts, signal) {
  const [path, body] = question(drafts);
  const parts = mode === "fill" ? withHoles($("prompt").value)[0] : [""];
  const [before, after] = [parts[0], parts.length > 1 ? parts.at(-1) : ""];
  box.replaceChildren();
  addGiven(box, before);
  const found = {text: "", calls: 0, tokens: 0, drafted: 0, accepted: 0, first: 0, last: 0, firstTokens: 0};
  const started = performance.now();
  const answer = await request(path, {method: "POST", body: JSON.stringify(body), signal});
  for await (const event of events(answer)) {
    const piece = mode === "chat" ? event.choices[0]?.delta.content ?? "" : event.content;
    const call = event.metrics?.speculative_decoding;
    if (!call) continue;
    found.last = performance.now() - started;
    found.first ||= found.last;
    found.firstTokens ||= call.num_tokens;
    found.calls += call.num_calls;
    found.tokens += call.num_tokens;
    found.drafted += call.num_draft_tokens;
    found.accepted += call.num_accepted_draft_tokens;
    found.text += piece;
    addCall(box, piece, found.calls, call);
    figures.textContent = describe(found);
  }
  addGiven(box, after);
  return found;
}

function addGiven(box, text) {
  if (!text) return;
  const given = document.createElement("span");
  given.className = "given";
  given.textContent = text;
  box.append(given);
}

function addCall(box, piece, number, call) {
  const span = document.createElement("span");
  span.className = `call c${number % 4}`;
  span.textContent = piece;
  const rejected = call.num_draft_tokens - call.num_accepted_draft_tokens;
  span.title = `call ${number}: ${call.num_tokens} tokens; ${call.num_draft_tokens} drafted, ${call.num_accepted_draft_tokens} accepted`;
  if (rejected) {
    const mark = document.createElement("span");
    mark.className = "rejections";
    mark.textContent = `−${rejected}`;
    mark.setAttribute("aria-hidden", "true");
    span.append(mark);
  }
  box.append(span);
}

const speed = (found) => (1000 * found.tokens) / found.last;
const laterSpeed = (found) => (1000 * (found.tokens - found.firstTokens)) / Math.max(found.last - found.first, 1);

function describe(found) {
  const parts = [
    `${found.tokens} tokens in ${found.calls} calls`, `${(found.tokens / found.calls).toFixed(2)} tokens a call`,
    `${speed(found).toFixed(1)} tokens/s`,
  ];
  if (found.drafted) parts.push(`${found.accepted} of ${found.drafted} drafts accepted`);
  return parts.join(" · ");
}

function say(text, wrong = false) {
  $("message").textContent = text;
  $("message").classList.toggle("wrong", wrong);
}

async function send(event) {
  event?.preventDefault();
  if (running || !$("prompt").value.trim()) return;
  if ($("key").value) sessionStorage.setItem("key", $("key").value);
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  $("plain").replaceChildren();
  $("plain-figures").textContent = $("drafted-figures").textContent = "–";
  try {
    say("Writing with drafts…");
    const drafted = await write($("drafted"), $("drafted-figures"), true, running.signal);
    say("Writing the same text plainly…");
    const plain = await write($("plain"), $("plain-figures"), false, running.signal);
    const same = drafted.text === plain.text ? "The two texts are the same." : "The two texts differ, which is a fault: please report it.";
    const ratio = (speed(drafted) / speed(plain)).toFixed(2);
    const later = (laterSpeed(drafted) / laterSpeed(plain)).toFixed(2);
    say(`${same} With drafts ${ratio} times as fast, ${later} times after the first piece.`, drafted.text !== plain.text);
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else say(error instanceof Wrong ? error.message : `The page failed: ${error.message}`, true);
  } finally {
    running = null;
    $("send").disabled = false;
    $("stop").disabled = true;
  }
}

function choose(next) {
  mode = next;
  for (const name of ["chat", "fill"]) {
    $(`tab-${name}`).setAttribute("aria-selected", String(name === next));
    $(`tab-${name}`).tabIndex = name === next ? 0 : -1;
  }
  $("prompt-label").textContent = next === "chat" ? "Prompt"
    : severalHoles ? "Text, with holes marked [[8]] (of 8 tokens) or [[…]]" : "Text, with a hole marked [[…]]";
  const examples = next === "fill" && severalHoles ? STORIES : EXAMPLES[next];
  $("prompt").value = examples[0];
  $("examples").replaceChildren(...examples.map((text, number) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = `Example ${number + 1}`;
    button.title = text;
    button.addEventListener("click", () => { $("prompt").value = text; $("prompt").focus(); });
    return button;
  }));
}

async function watch() {
  if (document.visibilityState === "visible") {
    try {
      const page = await (await fetch("metrics")).text();
      const value = (name) => {
        const rows = [...page.matchAll(new RegExp(`^vllm:${name}(?:\\{[^}]*\\})? ([0-9.e+]+)$`, "gm"))];
        return rows.reduce((sum, row) => sum + Number(row[1]), 0);
      };
      const drafts = value("spec_decode_num_draft_tokens_total");
      $("running").textContent = value("num_requests_running");
      $("waiting").textContent = value("num_requests_waiting");
      $("acceptance").textContent = drafts ? `${Math.round((100 * value("spec_decode_num_accepted_tokens_total")) / drafts)} %` : "–";
      $("written").textContent = value("generation_tokens_total").toLocaleString("en");
    } catch {
      for (const name of ["running", "waiting", "acceptance", "written"]) $(name).textContent = "–";
    }
  }
  setTimeout(watch, POLL_MILLISECONDS);
}

async function describeModel() {
  try {
    const card = (await (await request("v1/models")).json()).data[0];
    model = card.id;
    $("model").textContent = model;
    severalHoles = card.several_holes;
    $("tabs").hidden = !card.fill_in_the_middle && !severalHoles;
    if (severalHoles) choose("fill");
  } catch (error) {
    say(error.message, true);
  }
}

for (const method of METHODS) $("method").append(new Option(method, method));
choose("chat");
$("form").addEventListener("submit", send);
$("stop").addEventListener("click", () => running?.abort());
$("key").addEventListener("change", () => { sessionStorage.setItem("key", $("key").value); describeModel(); });
$("rejected").addEventListener("change", (event) => $("results").classList.toggle("show-rejections", event.target.checked));
for (const name of ["chat", "fill"]) {
  $(`tab-${name}`).addEventListener("click", () => choose(name));
  $(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    choose(name === "chat" ? "fill" : "chat");
    $(`tab-${mode}`).focus();
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
});
describeModel();
watch();
