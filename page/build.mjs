// Builds the page into the package: one script, one style, and the notices of what is in them.
import { readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const assets = join(here, "..", "src", "slipstream", "report", "assets");

const common = { bundle: true, minify: true, legalComments: "none", charset: "utf8", write: false };
const script = await build({
  ...common,
  absWorkingDir: here,
  entryPoints: ["src/main.tsx"],
  format: "iife",
  target: ["es2022"],
  jsx: "automatic",
  jsxImportSource: "preact",
  metafile: true,
});
const style = await build({ ...common, absWorkingDir: here, entryPoints: ["src/page.css"] });

// Every package that a file of the bundle comes from, with its licence as it was published.
const packages = [
  ...new Set(
    Object.keys(script.metafile.inputs)
      .map((path) => /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(path)?.[1])
      .filter(Boolean),
  ),
].sort();
const notices = packages
  .map((name) => {
    const folder = join(here, "node_modules", name);
    const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    const text = readFileSync(join(folder, "LICENSE"), "utf8").replace(/\r\n/g, "\n").trim();
    return `${name} ${version} (${license})\n\n${text}\n`;
  })
  .join("\n");
const comment = `/*! The page of slipstream. It contains:\n\n${notices.replaceAll("*/", "* /")}*/\n`;

writeFileSync(join(assets, "page.js"), comment + script.outputFiles[0].text);
writeFileSync(join(assets, "page.css"), style.outputFiles[0].text);
writeFileSync(join(assets, "NOTICES.txt"), `page.js contains:\n\n${notices}`);
