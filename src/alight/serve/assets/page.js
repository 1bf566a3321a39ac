"use strict";
const part = (id) => document.getElementById(id);
const PAUSE = 1000; // milliseconds between two looks at the service
let token = "";
let unit = "";
let inputKind = "";
let exitNames = [];

const PREFIXES = [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"], [0, " "]];

function amount(value, of) {
  if (value === null) return "–";
  const [scale, prefix] = of.endsWith("FLOPs") || of.endsWith("MACs") ? PREFIXES.find(([least]) => value >= least) : [0, " "];
  return Number((value / (scale || 1)).toPrecision(3)).toLocaleString("en") + prefix + of;
}

const percent = (share) => (100 * share).toFixed(1) + "%";

async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(token ? { Authorization: "Bearer " + token } : {}) };
  const response = await fetch(path, { ...options, headers });
  part("key").hidden = response.status !== 401;
  const content = await response.json();
  if (!response.ok) throw new Error(content.error);
  return content;
}

function options() {
  const chosen = {};
  const most = part("most").value.trim();
  const within = part("within").value.trim();
  if (most) chosen.budget = most;
  if (within) chosen.deadline_ms = Number(within);
  return chosen;
}

function show(response, pictures) {
  response.predictions.forEach((prediction, index) => {
    const line = document.createElement("li");
    if (pictures[index]) {
      const image = document.createElement("img");
      image.src = pictures[index];
      image.alt = "";
      line.append(image);
    }
    const words = document.createElement("div");
    const label = document.createElement("strong");
    label.textContent = prediction.label;
    const sure = prediction.probability === null ? "" : `probability ${percent(prediction.probability)}, `;
    const cost = amount(prediction.cost, response.unit);
    words.append(label, sure + `exit ${exitNames[prediction.exit] ?? prediction.exit}, cost ${cost}, ${response.latency_ms.toFixed(1)} ms`);
    line.append(words);
    part("predictions").prepend(line);
  });
  while (part("predictions").children.length > 20) part("predictions").lastChild.remove();
}

async function perform(work, pictures) {
  part("error").hidden = true;
  try {
    show(await work(), pictures);
    await look();
  } catch (error) {
    part("error").textContent = error.message;
    part("error").hidden = false;
  }
}

function sendFiles(files) {
  if (!files.length) return;
  const form = new FormData();
  for (const file of files) form.append("images", file);
  for (const [name, value] of Object.entries(options())) form.append(name, value);
  const pictures = Array.from(files, (file) => URL.createObjectURL(file));
  perform(() => ask("predict/files", { method: "POST", body: form }), pictures);
}

function sendWords() {
  const words = part("words").value;
  perform(() => {
    const samples = inputKind === "texts" ? { texts: [words] } : { arrays: [JSON.parse(words)] };
    const body = JSON.stringify({ ...samples, ...options() });
    return ask("predict", { method: "POST", body, headers: { "Content-Type": "application/json" } });
  }, []);
}

function row(exit, total) {
  const line = document.createElement("tr");
  const share = total ? exit.samples / total : 0;
  for (const text of [exit.name, amount(exit.cost, unit), exit.samples.toLocaleString("en"), total ? percent(share) : "–"]) {
    const cell = document.createElement("td");
    cell.textContent = text;
    line.append(cell);
  }
  const cell = document.createElement("td");
  const bar = document.createElement("div");
  cell.className = "bar";
  bar.style.width = 100 * share + "%";
  cell.append(bar);
  line.append(cell);
  return line;
}

/** Say in colour and in words that more was spent than allowed: mildly where the policy guarantees by how much. */
function warn(now) {
  const over = now.allowed ? now.spent - now.allowed : 0;
  const bounded = now.max_overspend !== null && over <= now.max_overspend;
  document.body.classList.toggle("ahead", over > 0 && bounded);
  document.body.classList.toggle("exceeded", over > 0 && !bounded);
  part("overspend").hidden = over <= 0;
  if (over <= 0) return;
  const words = bounded
    ? `${amount(over, unit)} more than the budget allows so far; guaranteed: at most ${amount(now.max_overspend, unit)}.`
    : `Over budget by ${amount(over, unit)} (${percent(over / now.allowed)}): choose a cheaper policy, or calibrate` +
      " with the contract 'stream', which keeps to its budget.";
  if (part("overspend").textContent !== words) part("overspend").textContent = words; // or it is read out every second
}

async function look() {
  const now = await ask("status");
  unit = now.unit;
  inputKind = now.input_kind;
  exitNames = now.exits.map((exit) => exit.name);
  part("drop").hidden = inputKind !== "images";
  part("write").hidden = inputKind === "images";
  part("words-label").textContent = inputKind === "texts" ? "A text" : `An array of shape ${now.input_shape.join(" × ")}, as JSON`;
  part("about").textContent = `${now.samples.toLocaleString("en")} samples answered since the start`;
  part("exits").replaceChildren(...now.exits.map((exit) => row(exit, now.samples)));
  part("queue").textContent = `${now.queue} samples wait`;
  part("alarm").hidden = !now.alarm;
  part("policy").value = now.policy;
  if (!now.samples) return;
  const mean = `${amount(now.spent / now.samples, unit)} per sample`;
  const share = now.allowed ? now.spent / now.allowed : 0;
  const spending = now.allowed ? `${mean}, ${percent(share)} of what the budget allows` : `${mean}, no budget`;
  part("spending").textContent = spending;
  part("meter").setAttribute("aria-label", spending);
  part("spent").style.width = 100 * Math.min(share, 1 / share) + "%";
  part("over").style.width = 100 * Math.max(0, 1 - 1 / share) + "%"; // all of it together is the whole meter
  warn(now);
}

async function begin() {
  const budget = await ask("budget");
  const choices = budget.policies.map((policy) => {
    const option = document.createElement("option");
    option.value = policy.name;
    option.textContent = policy.budget === null ? policy.name : `${policy.name}: ${amount(policy.budget, budget.unit)}`;
    return option;
  });
  part("policy").replaceChildren(...choices);
  await look();
}

async function watch() {
  try {
    if (!part("policy").options.length) await begin();
    else if (!document.hidden) await look();
  } catch (error) {
    part("about").textContent = `the service does not answer (${error.message})`;
  }
  setTimeout(watch, PAUSE);
}

part("file").addEventListener("change", (event) => {
  sendFiles(event.target.files);
  event.target.value = "";
});
part("drop").addEventListener("dragover", (event) => {
  event.preventDefault();
  part("drop").classList.add("over");
});
part("drop").addEventListener("dragleave", () => part("drop").classList.remove("over"));
part("drop").addEventListener("drop", (event) => {
  event.preventDefault();
  part("drop").classList.remove("over");
  sendFiles(event.dataTransfer.files);
});
part("send").addEventListener("click", sendWords);
part("policy").addEventListener("change", (event) => {
  const body = JSON.stringify({ policy: event.target.value });
  perform(async () => {
    await ask("budget", { method: "PUT", body, headers: { "Content-Type": "application/json" } });
    return { predictions: [] };
  }, []);
});
part("key").addEventListener("submit", (event) => {
  event.preventDefault();
  token = part("token").value;
  begin().catch((error) => (part("about").textContent = error.message));
});
watch();
