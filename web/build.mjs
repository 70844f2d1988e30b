// Bundles the package into dist/: an entry for the page, one for the engine's worker, one for its threads, one for Hugging
// Face's folders and adapters, and one for the primitives and kernels alone. The libraries are inside, so that a page needs no bundler.
import { execFileSync } from "node:child_process";
import { readFile, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

export const libraries = ["@huggingface/jinja", "@huggingface/tokenizers", "@noble/hashes"];
export const options = {
  entryPoints: ["index", "worker", "thread", "hf", "ops"].map((name) => fileURLToPath(new URL(`src/${name}.ts`, import.meta.url))),
  outdir: fileURLToPath(new URL("dist", import.meta.url)),
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  logLevel: "warning",
};

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  execFileSync("node_modules/.bin/tsc", ["--emitDeclarationOnly"], { stdio: "inherit" });
  const licenses = await Promise.all(
    libraries.map(async (name) => {
      const { version } = JSON.parse(await readFile(`node_modules/${name}/package.json`, "utf8"));
      return `${name} ${version}\n\n${await readFile(`node_modules/${name}/LICENSE`, "utf8")}`;
    }),
  );
  await writeFile("dist/third_party_licenses.txt", licenses.join("\n\n"));
  await build(options);
}
