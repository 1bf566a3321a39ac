"use strict";
const part = (id) => document.getElementById(id);
const PAUSE = 1000; // milliseconds between two looks at the service
let token = "";
let unit = "";
let takes = "";

const PREFIXES = [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"], [0, " "]];

function amount(value, of) {
  if (value === null) return "–";
  const [scale, prefix] = of.endsWith("FLOPs") || of.endsWith("MACs") ? PREFIXES.find(([least]) => value >= least) : [0, " "];
  return Number((value / (scale || 1)).toPrecision(3)).toLocaleString("en") + prefix + of;
}

const percent = (share) => (100 * share).toFixed(1) + "%";

async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(token ? { Authorization: "Bearer " + token } : {}) };
  const answer = await fetch(path, { ...options, headers });
  part("key").hidden = answer.status !== 401;
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error);
  return told;
}

function allowance() {
  const asked = {};
  const most = part("most").value.trim();
  const within = part("within").value.trim();
  if (most) asked.budget = most;
  if (within) asked.deadline_ms = Number(within);
  return asked;
}

function show(told, pictures) {
  told.answers.forEach((answer, index) => {
    const line = document.createElement("li");
    if (pictures[index]) {
      const image = document.createElement("img");
      image.src = pictures[index];
      image.alt = "";
      line.append(image);
    }
    const words = document.createElement("div");
    const label = document.createElement("strong");
    label.textContent = answer.label;
    const sure = answer.probability === null ? "" : percent(answer.probability) + " sure, ";
    words.append(label, sure + `exit ${answer.exit}, cost ${amount(answer.cost, told.unit)}, ${told.took_ms.toFixed(1)} ms`);
    line.append(words);
    part("answers").prepend(line);
  });
  while (part("answers").children.length > 20) part("answers").lastChild.remove();
}

async function answered(work, pictures) {
  part("wrong").hidden = true;
  try {
    show(await work(), pictures);
    await look();
  } catch (error) {
    part("wrong").textContent = error.message;
    part("wrong").hidden = false;
  }
}

function sendFiles(files) {
  if (!files.length) return;
  const form = new FormData();
  for (const file of files) form.append("images", file);
  for (const [name, value] of Object.entries(allowance())) form.append(name, value);
  const pictures = Array.from(files, (file) => URL.createObjectURL(file));
  answered(() => ask("predict/files", { method: "POST", body: form }), pictures);
}

function sendWords() {
  const words = part("words").value;
  answered(() => {
    const samples = takes === "texts" ? { texts: [words] } : { arrays: [JSON.parse(words)] };
    const body = JSON.stringify({ ...samples, ...allowance() });
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

async function look() {
  const now = await ask("status");
  unit = now.unit;
  takes = now.takes;
  part("drop").hidden = takes !== "images";
  part("write").hidden = takes === "images";
  part("words-label").textContent = takes === "texts" ? "A text" : `An array of shape ${now.shape.join(" × ")}, as JSON`;
  part("about").textContent = `${now.samples.toLocaleString("en")} samples answered since the start`;
  part("exits").replaceChildren(...now.exits.map((exit) => row(exit, now.samples)));
  part("queue").textContent = `${now.queue} samples wait`;
  part("alarm").hidden = !now.alarm;
  part("policy").value = now.policy;
  if (!now.samples) return;
  const mean = `${amount(now.spent / now.samples, unit)} per sample`;
  const share = now.allowed ? now.spent / now.allowed : 0;
  const ahead = share > 1 && now.ahead_at_most ? `, ahead by no more than one sample at ${amount(now.ahead_at_most, unit)}` : "";
  const told = now.allowed ? `${mean}, ${percent(share)} of what the budget allows${ahead}` : `${mean}, no budget`;
  part("spending").textContent = told;
  part("meter").setAttribute("aria-label", told);
  part("spent").style.width = Math.min(100, 100 * share) + "%";
}

async function begin() {
  const offered = await ask("budget");
  const options = offered.policies.map((policy) => {
    const option = document.createElement("option");
    option.value = policy.name;
    option.textContent = policy.budget === null ? policy.name : `${policy.name}: ${amount(policy.budget, offered.unit)}`;
    return option;
  });
  part("policy").replaceChildren(...options);
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
  answered(async () => {
    await ask("budget", { method: "PUT", body, headers: { "Content-Type": "application/json" } });
    return { answers: [] };
  }, []);
});
part("key").addEventListener("submit", (event) => {
  event.preventDefault();
  token = part("token").value;
  begin().catch((error) => (part("about").textContent = error.message));
});
watch();
