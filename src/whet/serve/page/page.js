// Chat with the served model, and the state of the server. Requests go to this server only.
const $ = (id) => document.getElementById(id);
const POLL_MS = 1000;
const KEPT = 60; // samples of the curve
const WINDOW = 5; // samples that a rate is the mean of

let messages = []; // of the conversation
let running; // AbortController of the request
let samples = []; // {time, tokens}
const models = new Map();

const authorization = () => {
  const key = sessionStorage.getItem("key");
  return key ? { authorization: `Bearer ${key}` } : {};
};

function report(text, isError = false) {
  $("status").textContent = text;
  $("status").classList.toggle("error", isError);
}

/** Return an error's message, and ask for a key if it is missing. */
async function explain(response) {
  const body = await response.json().catch(() => ({}));
  if (response.status === 401) {
    $("access").hidden = false;
    $("key").focus();
    return sessionStorage.getItem("key") ? "The server does not accept this key." : "";
  }
  return body.error?.message ?? `The server answered ${response.status}.`;
}

async function listModels() {
  const response = await fetch("v1/models", { headers: authorization() });
  if (!response.ok) return report(await explain(response), true);
  const chosen = $("model").value;
  models.clear();
  for (const card of (await response.json()).data) models.set(card.id, card);
  $("model").replaceChildren(...[...models.keys()].map((name) => new Option(name, name, false, name === chosen)));
  $("model").disabled = false;
  $("access").hidden = true;
  $("context").textContent = `${models.get($("model").value).max_model_len.toLocaleString("en")} tokens`;
  report("");
  return true;
}

// --- the conversation ---------------------------------------------------------------------------------------

const element = (name, properties = {}) => Object.assign(document.createElement(name), properties);

function addMessage(role, content) {
  const item = element("li", { className: role });
  const thinking = element("details", { hidden: true });
  thinking.append(element("summary", { textContent: "Thinking" }), element("span"));
  const text = element("div", { className: "text", textContent: content });
  const note = element("small", { hidden: true });
  item.append(thinking, text, note);
  $("chat").append(item);
  $("chat").scrollTop = $("chat").scrollHeight;
  return { item, thinking, text, note };
}

/** Yield the JSON of a stream's events. */
async function* events(stream) {
  let waiting = "";
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (waiting + value).split("\n\n");
    waiting = parts.pop();
    for (const part of parts) if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
  }
}

function append(node, text, into = node) {
  const isAtEnd = $("chat").scrollHeight - $("chat").scrollTop - $("chat").clientHeight < 40;
  into.append(text);
  node.hidden = false;
  if (isAtEnd) $("chat").scrollTop = $("chat").scrollHeight;
}

function request() {
  const system = $("system").value.trim();
  const body = {
    model: $("model").value,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const [id, name] of [["temperature", "temperature"], ["limit", "max_tokens"], ["seed", "seed"]]) {
    if ($(id).value !== "") body[name] = Number($(id).value);
  }
  return body;
}

async function ask(content) {
  messages.push({ role: "user", content });
  const question = addMessage("user", content);
  const answer = addMessage("assistant", "");
  answer.item.classList.add("running");
  answer.item.setAttribute("aria-busy", "true"); // read aloud when it is complete
  running = new AbortController();
  showRunning(true);
  report("");
  const begin = performance.now();
  let first = 0, usage, finish, problem = "";
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...authorization() },
      body: JSON.stringify(request()),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await explain(response));
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const [choice] = event.choices;
      if (choice === undefined) continue;
      finish = choice.finish_reason ?? finish;
      const { content: text, reasoning_content: thinking } = choice.delta;
      if (thinking || text) first ||= performance.now();
      if (thinking) append(answer.thinking, thinking, answer.thinking.lastChild);
      if (text) append(answer.text, text);
    }
  } catch (error) {
    if (error.name === "AbortError") finish = "stopped";
    else problem = error.message;
  }
  answer.item.classList.remove("running");
  answer.item.removeAttribute("aria-busy");
  const text = answer.text.textContent;
  if (problem && !text) { // refused: the message can be sent again
    messages.pop();
    question.item.remove();
    answer.item.remove();
    $("message").value ||= content;
  } else {
    messages.push({ role: "assistant", content: text });
    answer.note.textContent = describe(usage, finish, (first || performance.now()) - begin, performance.now() - first);
    answer.note.hidden = false;
  }
  if (problem) report(problem, true);
  running = undefined;
  showRunning(false);
}

/** Return a note on a complete answer; `first` is the time until its first token, `rest` the time after it, in ms. */
function describe(usage, finish, first, rest) {
  const reason = { length: "cut at the limit", abort: "ended by a pause", stopped: "stopped" }[finish];
  const parts = reason ? [reason] : [];
  if (usage) {
    const { completion_tokens: n } = usage;
    parts.push(`${n} tokens`);
    if (n > 1 && rest > 0) parts.push(`${((n - 1) / (rest / 1000)).toFixed(1)} tokens/s`);
    if (n > 0) parts.push(`first after ${(first / 1000).toFixed(2)} s`);
  }
  return parts.join(" · ");
}

function showRunning(isRunning) {
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
  $("clear").disabled = isRunning;
  $("message").focus();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = $("message").value.trim();
  if (content === "" || running) return;
  $("message").value = "";
  void ask(content);
});
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("clear").addEventListener("click", () => {
  messages = [];
  $("chat").replaceChildren();
  $("message").focus();
});
$("access").addEventListener("submit", async (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value);
  if (await listModels()) $("message").focus();
});

// --- the server ---------------------------------------------------------------------------------------------

/** Return the values of metrics in Prometheus' text by name, without labels. */
function parseMetrics(text) {
  const found = {};
  for (const [, name, value] of text.matchAll(/^vllm:(\w+)(?:\{[^}]*\})? (\S+)$/gm)) found[name] = Number(value);
  return found;
}

function showMetrics(metrics) {
  $("running").textContent = metrics.num_requests_running;
  $("waiting").textContent = metrics.num_requests_waiting;
  $("cache").textContent = `${(100 * metrics.kv_cache_usage_perc).toFixed(1)} %`;
  $("meter").value = metrics.kv_cache_usage_perc;
  const queries = metrics.prefix_cache_queries_total;
  $("hits").textContent = queries ? `${((100 * metrics.prefix_cache_hits_total) / queries).toFixed(0)} %` : "–";
  samples.push({ time: performance.now(), tokens: metrics.generation_tokens_total });
  samples = samples.slice(-KEPT - WINDOW);
  const rates = samples.slice(1).map((sample, i) => {
    const before = samples[Math.max(0, i + 1 - WINDOW)];
    return Math.max(0, (1000 * (sample.tokens - before.tokens)) / (sample.time - before.time));
  });
  $("rate").textContent = rates.length > 0 ? rates.at(-1).toFixed(1) : "–";
  const shown = rates.slice(-KEPT), most = Math.max(1, ...shown);
  const points = shown.map((rate, i) => `${60 - shown.length + i},${(23 - (22 * rate) / most).toFixed(2)}`);
  $("curve").querySelector("polyline").setAttribute("points", points.join(" "));
}

let isAway = false;
async function poll() {
  if (!document.hidden) {
    try {
      const response = await fetch("metrics");
      if (!response.ok) throw new Error(await explain(response));
      showMetrics(parseMetrics(await response.text()));
      if (isAway) await listModels();
      isAway = false;
    } catch (error) {
      isAway = true;
      report(error instanceof TypeError ? "The server cannot be reached." : error.message, true);
    }
  }
  setTimeout(poll, POLL_MS);
}

$("model").addEventListener("focus", () => void listModels()); // adapters come and go
await listModels().catch((error) => report(error.message, true));
void poll();
if ($("access").hidden) $("message").focus();
