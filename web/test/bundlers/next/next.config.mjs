export default { output: "export", turbopack: { root: new URL("../..", import.meta.url).pathname } };
