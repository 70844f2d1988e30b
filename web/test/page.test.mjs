// The example page in Chromium: load, chat and measure by keyboard; wide and narrow, light and dark.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { existsSync } from "node:fs";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { FIXTURES } from "./fixtures.mjs";

const executablePath = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find(existsSync);

test("the example page loads a model, chats, measures and learns", { skip: executablePath === undefined && "Chromium is not installed" }, async () => {
  const { chromium } = await import("playwright-core");
  const path = fileURLToPath(new URL("../example/serve.mjs", import.meta.url));
  const server = spawn(process.execPath, [path, "0", fileURLToPath(FIXTURES)], { stdio: ["ignore", "pipe", "inherit"] });
  const url = await new Promise((resolve) => server.stdout.once("data", (data) => resolve(String(data).trim())));
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
  try {
    const page = await browser.newPage({ viewport: { width: 1200, height: 900 } });
    const problems = [];
    page.on("pageerror", (error) => problems.push(error.message));
    await page.goto(url);
    const status = (text) => page.waitForFunction((end) => document.querySelector("#status").textContent.includes(end), text);
    await page.fill("#temperature", ""); // without a model
    await page.fill("#url", "http://[");
    await page.press("#url", "Enter");
    await status("source is \"http://[\", expected a URL");
    await page.fill("#url", "models/none.gguf");
    await page.press("#url", "Enter");
    await status("answered 404");
    await page.fill("#url", "models/q8_0.gguf");
    await page.press("#url", "Enter");
    await status("q8_0.gguf is ready.");
    assert.match(await page.textContent("#facts"), /Architecturellama.*Bit-identical to nativeyes/);
    await page.keyboard.type("Why?"); // the message field has the focus
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => !document.querySelector("#send").disabled);
    assert.match(await page.textContent("#chat"), /^Why\?.+/s);
    assert.equal(await page.textContent("#status"), "models/q8_0.gguf is ready.");
    assert.equal(await page.inputValue("#temperature"), "0.7");
    await page.fill("#message", "long ".repeat(3000)); // rejected and restored
    await page.press("#message", "Enter");
    await status("Shorten it");
    assert.equal(await page.locator("#chat li").count(), 2);
    assert.match(await page.inputValue("#message"), /^long /);
    await page.fill("#message", "");
    await page.click("#measure");
    await status("Measured.");
    for (const speed of await page.locator("#speeds td").allTextContents()) assert.ok(Number(speed) > 0, speed);
    await page.fill("#steps", "3");
    for (const way of ["sft", "grpo"]) {
      await page.selectOption("#way", way);
      await page.click("#learn");
      await page.waitForFunction(() => !document.querySelector("#learn").disabled, undefined, { timeout: 120000 });
      assert.match(await page.evaluate(() => document.querySelector("#learned").value), /^3 steps in \d+ s$/);
      assert.equal((await page.getAttribute("#curve polyline", "points")).split(" ").length, 3);
      assert.match(await page.textContent("#curve title"), new RegExp(`^${way === "sft" ? "Loss" : "Mean reward"}: \\d+\\.\\d\\d at step 3 of 3`));
      for (const share of await page.locator("#accuracy td").allTextContents()) assert.match(share, /^\d+ %$/);
    }
    await page.click("#save");
    await status("Saved the adapters");
    await page.fill("#steps", "500");
    await page.selectOption("#way", "sft");
    await page.click("#learn");
    await page.waitForFunction(() => document.querySelector("#learned").value.endsWith("s a step"));
    await page.click("#halt");
    await page.waitForFunction(() => !document.querySelector("#learn").disabled);
    assert.match(await page.evaluate(() => document.querySelector("#learned").value), /^Stopped after \d+ steps$/);
    for (const [colorScheme, width] of [["light", 1200], ["dark", 1200], ["dark", 360], ["light", 360]]) {
      await page.emulateMedia({ colorScheme });
      await page.setViewportSize({ width, height: 800 });
      assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), `the page is wider than ${width}`);
    }
    const unnamed = await page.$$eval("input, textarea, button, select, progress", (all) =>
      all.filter((each) => !(each.labels?.length || each.textContent || each.ariaLabel)).map(({ id }) => id),
    );
    assert.deepEqual([unnamed, problems], [[], []]);
  } finally {
    await browser.close();
    server.kill();
  }
});
