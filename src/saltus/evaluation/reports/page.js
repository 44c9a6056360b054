"use strict";
// Replay answers call by call, at the speed that was measured.
const data = JSON.parse(document.getElementById("data").textContent);
const get = (id) => document.getElementById(id);
const [play, time, clock, rate, prompt, tip, verdict] =
  ["play", "time", "clock", "rate", "prompt", "tip", "verdict"].map(get);
const promptText = get("prompt-text");
const panes = ["left", "right"].map((id) => ({
  root: get(id), system: get(id).querySelector("select"), text: get(id).querySelector(".text"),
  track: get(id).querySelector(".track"), count: get(id).querySelector(".count"), cover: null,
  answer: null, ends: [], sums: [], spans: [], shown: 0, cursor: -1,
}));
let now = 0, end = 1, frame = 0, last = 0;

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const seconds = (ms) => `${(ms / 1000).toFixed(2)} s`;

/** Put an answer into a pane, all runs in place; what is not written yet is merely hidden, so that nothing jumps. */
function fill(pane) {
  promptText.textContent = data.tasks[prompt.value].prompt;
  const answer = data.tasks[prompt.value].by[pane.system.value];
  pane.root.style.setProperty("--c", `var(--side-${data.systems[pane.system.value].colour})`);
  pane.answer = answer || null;
  pane.ends = []; pane.sums = []; pane.shown = 0; pane.cursor = -1;
  pane.text.replaceChildren(); pane.track.replaceChildren();
  if (!answer) {
    pane.spans = []; pane.text.textContent = "no answer of this system";
    return;
  }
  let at = 0, tokens = 0;
  for (const [decided, , ms] of answer.calls || [[answer.tokens, 0, answer.seconds * 1000]]) {
    pane.ends.push(at += ms + (answer.rest || 0)); pane.sums.push(tokens += decided);
  }
  pane.spans = answer.pieces.map((piece, index) => {
    const span = document.createElement("span");
    span.textContent = piece;
    span.className = answer.calls ? `r${index % 5} off${answer.calls[index][0] > 1 ? " many" : ""}` : "block off";
    return span;
  });
  pane.text.append(...pane.spans);
  pane.text.scrollTop = 0;
}

/** The calls of a pane as blocks on the time that both panes share. */
function drawTrack(pane) {
  let from = 0;
  const block = (x, width, fill, opacity) => {
    const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    rect.setAttribute("x", x); rect.setAttribute("width", Math.max(width, 0)); rect.setAttribute("height", 10);
    rect.style.fill = fill; rect.style.opacity = opacity;
    pane.track.append(rect);
    return rect;
  };
  for (const [index, to] of pane.ends.entries()) {
    const several = pane.answer.calls && pane.answer.calls[index][0] > 1;
    const gap = pane.ends.length < 150 ? 1.2 : 0;
    block(1000 * from / end, 1000 * (to - from) / end - gap, several ? `var(--s${index % 5})` : "var(--muted)",
      several ? 1 : index ? .5 : .25);  // the first call reads the prompt
    from = to;
  }
  pane.cover = block(0, 1000, "var(--paper)", .78);
}

/** Show both texts as they stood at a moment, in milliseconds since the start. */
function show(moment) {
  now = Math.min(Math.max(moment, 0), end);
  for (const pane of panes) {
    let count = pane.shown;
    while (count < pane.ends.length && pane.ends[count] <= now + .01) pane.spans[count++].classList.remove("off");
    while (count > 0 && pane.ends[count - 1] > now + .01) pane.spans[--count].classList.add("off");
    if (frame && count > pane.shown && pane.text.scrollHeight > pane.text.clientHeight) {
      const run = pane.spans[count - 1];
      pane.text.scrollTop = run.offsetTop + run.offsetHeight - pane.text.clientHeight + 30;
    }
    pane.shown = count;
    const done = count === pane.ends.length;
    pane.root.classList.toggle("done", done && Boolean(pane.answer));
    pane.count.textContent = !pane.answer ? "" : !pane.answer.calls && !done ? "shown when done: its calls are not reported"
      : `${plural(count ? pane.sums[count - 1] : 0, "token")}${pane.answer.calls ? ` · ${plural(count, "call")}` : ""}`
        + (done ? ` · ${seconds(pane.ends.at(-1))}` : "");
    if (pane.cover) pane.cover.setAttribute("x", 1000 * now / end);
  }
  time.value = 1000 * now / end;
  time.setAttribute("aria-valuetext", seconds(now));
  clock.textContent = seconds(now);
  judge();
}

function judge() {
  const [one, two] = panes;
  verdict.replaceChildren();
  if (!one.answer || !two.answer || now < end - .01) return;
  const names = panes.map((pane) => data.systems[pane.system.value].name);
  const strong = document.createElement("b");
  strong.textContent = `${(one.ends.at(-1) / two.ends.at(-1)).toFixed(2)} ×`;
  const same = one.answer.pieces.join("") === two.answer.pieces.join("");
  verdict.append(`${names[1]}: `, strong, ` the speed of ${names[0]} on this answer, ${seconds(two.ends.at(-1))} against `
    + `${seconds(one.ends.at(-1))}. ${same ? "The same text." : "The texts differ."}`);
  for (const [index, pane] of panes.entries()) {
    if (pane.answer.problems.length) verdict.append(` ${names[index]}: ${pane.answer.problems.join("; ")}`);
  }
}

function choose() {
  stop();
  panes.forEach((pane) => { pane.cover = null; fill(pane); });
  end = Math.max(1, ...panes.map((pane) => pane.ends.at(-1) || 0));
  panes.forEach((pane) => pane.answer && drawTrack(pane));
  hideTip();
  show(end);
}

function tick(stamp) {
  const passed = (stamp - last) * Number(rate.value);
  last = stamp;
  show(now + passed);
  if (now >= end) stop(); else frame = requestAnimationFrame(tick);
}

function start() {
  if (now >= end - .01) { panes.forEach((pane) => { pane.text.scrollTop = 0; }); show(0); }
  play.textContent = "Pause";
  last = performance.now();
  frame = requestAnimationFrame(tick);
}

function stop() {
  cancelAnimationFrame(frame);
  frame = 0;
  play.textContent = "Play";
}

/** Go to the moment at which the right side's next (1) or last (-1) call was done. */
function step(direction) {
  stop();
  const ends = panes[1].ends, count = panes[1].shown;
  show(direction > 0 ? ends[count] ?? end : count > 1 ? ends[count - 2] : 0);
}

function turnTo(change) {
  const count = data.tasks.length;
  prompt.value = (Number(prompt.value) + change + count) % count;
  choose();
}

function point(pane, index) {
  panes.forEach((each) => each.spans[each.cursor]?.classList.remove("at"));
  panes.forEach((each) => { each.cursor = -1; });
  const span = pane.spans[index];
  if (!span || span.classList.contains("off")) return hideTip();
  pane.cursor = index;
  span.classList.add("at");
  const call = pane.answer.calls?.[index];
  tip.textContent = call
    ? `call ${index + 1}: ${plural(call[0], "token")}, ${plural(call[1], "node")} checked, ${call[2].toFixed(1)} ms`
    : `${plural(pane.answer.tokens, "token")} in ${seconds(pane.answer.seconds * 1000)}; calls are not reported`;
  tip.hidden = false;
  const box = span.getClientRects()[0] || pane.text.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left), innerWidth - tip.offsetWidth - 8);
  tip.style.left = `${left}px`;
  tip.style.top = `${box.top > tip.offsetHeight + 12 ? box.top - tip.offsetHeight - 6 : box.bottom + 6}px`;
}

function hideTip() {
  panes.forEach((pane) => { pane.spans[pane.cursor]?.classList.remove("at"); pane.cursor = -1; });
  tip.hidden = true;
}

for (const pane of panes) {
  data.systems.forEach((system, index) => pane.system.add(new Option(system.name, index)));
  pane.system.addEventListener("change", choose);
  pane.text.addEventListener("pointerover", (event) => {
    const index = pane.spans.indexOf(event.target);
    if (index >= 0) point(pane, index);
  });
  pane.text.addEventListener("pointerleave", hideTip);
  pane.text.addEventListener("blur", hideTip);
  pane.text.addEventListener("scroll", () => { tip.hidden = true; });
  pane.text.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move || !pane.spans.length) return;
    event.preventDefault();
    const index = Math.min(Math.max(pane.cursor + move, 0), pane.shown - 1);
    pane.spans[index]?.scrollIntoView({ block: "nearest" });
    point(pane, index);
  });
}
data.tasks.forEach((task, index) => {
  const turns = data.tasks.filter((other) => other.task === task.task).length;
  prompt.add(new Option(`${task.task} · ${task.category}${turns > 1 ? ` · turn ${task.turn + 1}` : ""}`, index));
});
panes[0].system.value = Math.max(0, data.systems.findIndex((system) => system.name === "plain"));
panes[1].system.value = Math.max(0, data.systems.findIndex((system) => system.name === data.best));
prompt.value = data.first;
prompt.addEventListener("change", choose);
play.addEventListener("click", () => (frame ? stop() : start()));
time.addEventListener("input", () => { stop(); show(end * time.value / 1000); });
addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
for (const [id, action] of [["before", () => turnTo(-1)], ["after", () => turnTo(1)],
  ["back", () => step(-1)], ["on", () => step(1)]]) get(id).addEventListener("click", action);
choose();
