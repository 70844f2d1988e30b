// State of the page: one engine and one chat. Each action of the page is one function below.
import { Engine } from "./dist/index.js";
import { drawCurve, measureAccuracy, WAYS } from "./sums.js";

const at = (id) => document.getElementById(id);
const inputs = ["message", "send", "clear", "measure", "learn", "save", "way"];
let engine, chat, adapter, running, learner, learning;

function showStatus(text, isError = false) {
  at("status").textContent = text;
  at("status").classList.toggle("error", isError);
}

function enable(isReady) {
  for (const id of inputs) at(id).disabled = !isReady;
  at("stop").disabled = isReady || running === undefined;
  at("adapters").disabled = !isReady;
  at("halt").disabled = learning === undefined;
  if (learner === undefined) at("save").disabled = true;
}

const megabytes = (bytes) => `${Math.round(bytes / 1e6).toLocaleString()} MB`;

async function open(source, name) {
  running?.abort();
  engine?.close();
  engine = chat = adapter = learner = undefined;
  learning?.abort();
  at("adapted").checked = false;
  at("adapted").disabled = true;
  enable(false);
  at("facts").replaceChildren();
  at("progress").hidden = false;
  showStatus(`Loading ${name} ...`);
  try {
    const onProgress = ({ loadedBytes, totalBytes }) => (at("progress").value = totalBytes > 0 ? loadedBytes / totalBytes : 0);
    const load = (how) => Engine.load(source, { contextLength: 2048, maxBatch: 16, onProgress, ...how });
    const loading = at("gpu").checked ? load({ device: "gpu" }) : load({ learning: true });
    engine = await loading.catch((error) => {
      if (!error.message.includes("learning needs")) throw error;
      return load(); // this browser can chat, but not learn
    });
    show(await engine.info());
    startChat();
    showStatus(`${name} is ready.`);
    enable(true);
    at("message").focus();
  } catch (error) {
    showStatus(error.message, true);
  } finally {
    at("progress").hidden = true;
  }
}

function show(info) {
  const facts = {
    Architecture: info.architecture,
    Parameters: `${(info.parameters / 1e6).toFixed(0)} million`,
    Weights: `${megabytes(info.weightsBytes)} (${info.formats.join(", ")})`,
    Memory: megabytes(info.memoryBytes),
    "Computed by": info.gpu ?? `${info.threads} ${info.threads === 1 ? "thread" : "threads"}${info.fallback === undefined ? "" : ` (${info.fallback})`}`,
    "Bit-identical to native": info.exact ? "yes" : info.device === "gpu" ? "no: on a GPU" : "no: this browser rounds twice",
  };
  at("facts").replaceChildren(
    ...Object.entries(facts).flatMap(([name, value]) => {
      const [term, text] = [document.createElement("dt"), document.createElement("dd")];
      [term.textContent, text.textContent] = [name, value];
      return [term, text];
    }),
  );
}

function startChat() {
  const options = { maxNewTokens: 512, seed: Math.floor(Math.random() * 2 ** 32) };
  chat = engine.chat(at("adapted").checked ? { ...options, adapter } : options);
  at("chat").replaceChildren();
  at("rate").value = "";
}

function add(role, text) {
  const item = document.createElement("li");
  item.className = role;
  item.dataset.role = role === "user" ? "You" : "Model";
  item.textContent = text;
  at("chat").append(item);
  at("chat").scrollTop = at("chat").scrollHeight;
  return item;
}

/** Return the temperature; reset an empty field to its default. */
function temperature() {
  const field = at("temperature");
  if (field.value === "") field.value = field.defaultValue;
  return field.valueAsNumber;
}

async function send() {
  const text = at("message").value.trim();
  if (text === "" || running !== undefined) return;
  at("message").value = "";
  const [question, reply] = [add("user", text), add("model", "")];
  const nBefore = chat.messages.length;
  running = new AbortController();
  enable(false);
  let n = 0;
  let first;
  try {
    for await (const token of chat.send(text, { temperature: temperature(), signal: running.signal })) {
      first ??= performance.now();
      reply.append(token.text);
      at("chat").scrollTop = at("chat").scrollHeight;
      if (n++ > 0) at("rate").value = `${((n - 1) / ((performance.now() - first) / 1000)).toFixed(1)} tokens/s`;
    }
  } catch (error) {
    if (error.name !== "AbortError") showStatus(error.message, true);
  } finally {
    if (n === 0) {
      question.remove();
      reply.remove();
      at("message").value = text;
    } else if (chat.messages.length < nBefore + 2) showStatus("The context is full: the oldest turns were dropped.");
    running = undefined;
    enable(true);
    at("message").focus();
  }
}

async function measure() {
  enable(false);
  showStatus("Measuring ...");
  try {
    const { vocabSize } = await engine.info();
    const prompt = Array.from({ length: 256 }, (_, i) => 5 + ((i * 7919) % (vocabSize - 5)));
    const times = [performance.now()];
    for await (const _ of engine.generate(prompt, { temperature: 0, minNewTokens: 65, maxNewTokens: 65 })) times.push(performance.now());
    const rates = [(256 / (times[1] - times[0])) * 1000, (64 / (times[65] - times[1])) * 1000];
    for (const [i, rate] of rates.entries()) at("speeds").rows[i].cells[1].textContent = rate.toFixed(1);
    showStatus("Measured.");
  } catch (error) {
    showStatus(error.message, true);
  } finally {
    enable(true);
  }
}

/** Train for some steps, and measure before and after. A second run continues with the adapters of the first. */
async function learn() {
  const way = WAYS[at("way").value];
  const steps = at("steps").valueAsNumber;
  const [mine, values] = [engine, []];
  const report = (text) => (at("learned").value = text);
  const showAccuracy = (row, share) => (at("accuracy").rows[row].cells[1].textContent = share === undefined ? "\u2013" : `${Math.round(100 * share)} %`);
  learning = new AbortController();
  const { signal } = learning;
  enable(false);
  try {
    learner ??= await engine.learner({ rank: 8 });
    showAccuracy(1);
    report("Measuring ...");
    showAccuracy(0, await measureAccuracy(engine, await learner.sync(), signal));
    drawCurve(at("curve"), way.curve, values, steps);
    report("Learning ...");
    const begin = performance.now();
    const onProgress = (progress) => {
      values.push(way.valueOf(progress));
      drawCurve(at("curve"), way.curve, values, steps);
      report(`${((performance.now() - begin) / 1000 / values.length).toFixed(1)} s a step`);
    };
    await way.run(learner, { steps, onProgress, signal });
    report(`${steps} steps in ${Math.round((performance.now() - begin) / 1000)} s`);
  } catch (error) {
    report(`Stopped after ${values.length} steps`);
    if (error.name !== "AbortError") showStatus(error.message, true);
  } finally {
    if (engine === mine) {
      learning = undefined;
      if (values.length > 0) {
        adapter = await learner.sync();
        showAccuracy(1, await measureAccuracy(engine, adapter));
        at("adapted").disabled = false;
        startChat();
      }
      enable(true);
    } // else another model was opened
  }
}

async function saveLearned() {
  try {
    await learner.save("sums");
    showStatus("Saved the adapters in this browser as \u201csums\u201d.");
  } catch (error) {
    showStatus(error.message, true);
  }
}

async function openAdapter() {
  try {
    if (adapter !== undefined) await engine.removeAdapter(adapter);
    adapter = await engine.loadAdapter([...at("adapter").files]);
    at("adapted").disabled = false;
    at("adapted").checked = true;
    startChat();
    showStatus("The adapter is ready. A new chat begins.");
  } catch (error) {
    showStatus(error.message, true);
  }
}

at("open").addEventListener("submit", (event) => {
  event.preventDefault();
  const url = at("url").value.trim();
  if (url !== "") open(url, url);
});
at("file").addEventListener("change", () => {
  const files = [...at("file").files].sort((a, b) => (a.name < b.name ? -1 : 1));
  if (files.length > 0) open(files.length === 1 ? files[0] : files, files[0].name);
});
at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", startChat);
at("measure").addEventListener("click", measure);
at("learn").addEventListener("click", learn);
at("halt").addEventListener("click", () => learning?.abort());
at("save").addEventListener("click", saveLearned);
at("adapter").addEventListener("change", openAdapter);
at("adapted").addEventListener("change", startChat);
for (const name of ["dragover", "dragleave", "drop"]) {
  document.body.addEventListener(name, (event) => {
    event.preventDefault();
    document.body.classList.toggle("dropping", name === "dragover");
    const files = name === "drop" ? [...event.dataTransfer.files] : [];
    if (files.length > 0) open(files.length === 1 ? files[0] : files, files[0].name);
  });
}

const listed = await fetch("models.json").then((response) => (response.ok ? response.json() : []), () => []);
at("models").replaceChildren(...listed.map((value) => Object.assign(document.createElement("option"), { value })));
at("url").value = listed[0] ?? "";
