// Drives the page of whet serve in Chromium: node page.mjs SETTINGS, JSON of {url, keyed, screenshots}.
//
// url: a server of a tiny model whose steps are slow; keyed: one that wants the key "right"; screenshots: a folder, or "".
import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { createRequire } from "node:module";

const { chromium } = createRequire(new URL("../../web/package.json", import.meta.url))("playwright-core");
const { url, keyed, screenshots } = JSON.parse(process.argv[2]);
const executablePath = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find(existsSync);
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const problems = [];

async function open(address, options) {
  const page = await browser.newPage(options);
  page.on("pageerror", (error) => problems.push(error.message));
  page.on("console", (message) => {
    if (message.type() === "error" && !/status of (400|401)/.test(message.text())) problems.push(message.text());
  });
  page.on("request", (request) => {
    if (!request.url().startsWith(address) && !request.url().startsWith("data:")) problems.push(request.url());
  });
  await page.goto(address);
  return page;
}
const text = (page, id) => page.textContent(`#${id}`);
const until = (page, condition, argument) => page.waitForFunction(condition, argument, { timeout: 60000 });
const shoot = (page, name) => (screenshots ? page.screenshot({ path: `${screenshots}/${name}.png` }) : undefined);
const NAME = `red-${"long-".repeat(20)}name`;
const isStopped = () => !document.querySelector("#send").hidden;
const isWide = (page) => page.evaluate(() => document.documentElement.scrollWidth > document.documentElement.clientWidth);

try {
  // By keyboard: ask, stop, ask again.
  const page = await open(url, { viewport: { width: 1200, height: 800 } });
  await until(page, () => document.querySelector("#model").value === "tiny");
  assert.deepEqual(await page.locator("#model option").allTextContents(), ["tiny", NAME]);
  assert.equal(await text(page, "context"), "512 tokens");
  assert.equal(await page.evaluate(() => document.activeElement.id), "message");
  await page.keyboard.type("hello");
  await page.keyboard.press("Shift+Enter");
  await page.keyboard.type("there");
  await page.keyboard.press("Enter");
  await until(page, () => document.querySelector("#chat .assistant .text").textContent.length > 9);
  assert.equal(await page.textContent("#chat .user .text"), "hello\nthere");
  await until(page, () => document.querySelector("#running").textContent === "1");
  await until(page, () => Number(document.querySelector("#rate").textContent) > 1);
  await shoot(page, "stream-light");
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.id), "stop");
  await page.keyboard.press("Enter");
  await until(page, isStopped);
  assert.match(await page.textContent("#chat .assistant small"), /^stopped/);
  const cut = await page.textContent("#chat .assistant .text");
  await until(page, () => document.querySelector("#running").textContent === "0");
  assert.equal(await page.textContent("#chat .assistant .text"), cut);
  assert.equal(await page.evaluate(() => document.activeElement.id), "message");

  // Settings, and the earlier turns in the request.
  await page.click("#ask summary");
  await page.fill("#limit", "5");
  await page.fill("#temperature", "0");
  await page.fill("#system", "s");
  const [sent] = await Promise.all([page.waitForRequest(/chat/), page.fill("#message", "again").then(() => page.press("#message", "Enter"))]);
  const body = sent.postDataJSON();
  assert.deepEqual(body.messages.map((message) => message.role), ["system", "user", "assistant", "user"]);
  assert.equal(body.messages[2].content, cut);
  assert.deepEqual([body.max_tokens, body.temperature, body.model], [5, 0, "tiny"]);
  await until(page, isStopped);
  assert.match(await page.locator("#chat .assistant small").last().textContent(), /^cut at the limit · 5 tokens · \d+\.\d tokens\/s · first after \d\.\d\d s$/);
  await shoot(page, "settings-light");

  // A request that is refused can be sent again.
  await page.fill("#message", "long ".repeat(200));
  await page.press("#message", "Enter");
  await until(page, () => document.querySelector("#status.error") !== null);
  assert.match(await text(page, "status"), /maximum context length is 512/);
  assert.match(await page.inputValue("#message"), /^long /);
  assert.equal(await page.locator("#chat li").count(), 4);
  await page.click("#clear");
  assert.equal(await page.locator("#chat li").count(), 0);
  await page.fill("#message", "");
  await page.close();

  // Narrow and dark, and Escape.
  for (const [name, options] of Object.entries({
    "narrow-light": { viewport: { width: 360, height: 640 } },
    "narrow-dark": { viewport: { width: 360, height: 640 }, colorScheme: "dark" },
    "wide-dark": { viewport: { width: 1200, height: 800 }, colorScheme: "dark" },
  })) {
    const page = await open(url, options);
    await page.selectOption("#model", NAME);
    await page.fill("#message", "a question that is long enough for several lines on a small display");
    await page.press("#message", "Enter");
    await until(page, () => document.querySelector("#chat .assistant .text").textContent.length > 9);
    assert.ok(!(await isWide(page)), `${name} scrolls sideways`);
    await until(page, () => document.querySelector("#running").textContent === "1");
    await shoot(page, name);
    for (const id of ["model", "message", "stop", "running", "rate", "cache"]) {
      const box = await page.locator(`#${id}`).boundingBox();
      assert.ok(box.x >= 0 && box.x + box.width <= options.viewport.width && box.y + box.height <= options.viewport.height, `${name}: ${id}`);
    }
    await page.keyboard.press("Escape");
    await until(page, isStopped);
    await page.click("#ask summary");
    assert.ok(!(await isWide(page)), `${name} scrolls sideways with its settings`);
    await shoot(page, `${name}-settings`);
    await page.close();
  }

  // A key.
  const locked = await open(keyed, { viewport: { width: 360, height: 640 } });
  await until(locked, () => !document.querySelector("#access").hidden);
  assert.equal(await locked.evaluate(() => document.activeElement.id), "key");
  assert.equal(await text(locked, "status"), "");
  await shoot(locked, "key");
  await locked.keyboard.type("wrong");
  await locked.keyboard.press("Enter");
  await until(locked, () => document.querySelector("#status").textContent.includes("does not accept"));
  assert.ok(await locked.isVisible("#access"));
  await locked.fill("#key", "right");
  await locked.press("#key", "Enter");
  await until(locked, () => document.querySelector("#access").hidden && document.activeElement.id === "message");
  await locked.keyboard.type("hello");
  await locked.keyboard.press("Enter");
  await until(locked, () => document.querySelector("#chat .assistant .text").textContent.length > 2);
  await locked.keyboard.press("Escape");
  await until(locked, isStopped);
  assert.deepEqual(problems, []);
} finally {
  await browser.close();
}
