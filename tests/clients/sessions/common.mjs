// The conversation that every program holds, and its tool: common.py in JavaScript.
import { readFileSync } from "node:fs";

export const [address, model] = process.argv.slice(2);
const conversation = JSON.parse(readFileSync(new URL("conversation.json", import.meta.url)));
export const { system, requests, notes, people } = conversation;
export const description = "Read the note with a name.";
export const parameters = {
  type: "object",
  properties: { name: { type: "string", description: "The name of the note." } },
  required: ["name"],
};
let runs = [];

export function readNote({ name }) {
  runs.push({ name });
  return notes[name] ?? `There is no note ${name}.`;
}

export async function hold(conversations) {
  const report = {};
  for (const [title, conversation] of Object.entries(conversations)) {
    runs = [];
    try {
      const answers = await conversation();
      report[title] = { runs, answers };
    } catch (error) {
      console.error(error);
      report[title] = { error: String(error).slice(0, 500) };
    }
  }
  console.log(JSON.stringify(report));
}
