// Page that loads a model, an adapter and a folder by URL. `assets`: for bundlers that do not copy the package's files.
import { Engine } from "whet-web";

const tokensOf = async (engine, ids) => {
  const tokens = [];
  for await (const { token } of engine.generate(ids, { temperature: 0, maxNewTokens: 8, stopTokenIds: [] })) tokens.push(token);
  return tokens;
};

globalThis.run = async (ids, options) => {
  const engine = await Engine.load("/q8_0.gguf", { threads: 2, cache: false, ...options });
  const tokens = await tokensOf(engine, ids);
  const adapter = await engine.loadAdapter("/adapter/");
  const { build, threads } = await engine.info();
  engine.close();
  const folder = await Engine.load("/folder/", { threads: 1, cache: false, ...options });
  const fromFolder = await tokensOf(folder, ids);
  folder.close();
  return { tokens, adapter, build, threads, fromFolder };
};
