// The frame of the JavaScript files beside this one; see scenarios.py. It lies in the folder of their packages.
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

export const url = process.argv[2];

function version(name) {
  return JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url))).version;
}

/** Run functions by name in order, each whether or not the one before failed. */
export async function run(packages, scenarios) {
  console.log(JSON.stringify({ versions: Object.fromEntries(packages.map((name) => [name, version(name)])) }));
  for (const [scenario, check] of Object.entries(scenarios)) {
    let error = null;
    try {
      await check();
    } catch (caught) {
      error = String(caught.stack ?? caught) + (caught.stdout ?? "") + (caught.stderr ?? "");
    }
    console.log(JSON.stringify({ scenario, error }));
  }
}

/** Call a function with a temporary folder, and return its result. */
export async function inFolder(use) {
  const folder = mkdtempSync(join(tmpdir(), "client-"));
  try {
    return await use(folder);
  } finally {
    rmSync(folder, { recursive: true });
  }
}

/** Run a program of the packages with two minutes at most, and return its output and exit status. */
export function program(name, args, { cwd, env }) {
  const path = new URL(`node_modules/.bin/${name}`, import.meta.url).pathname;
  return new Promise((resolve, reject) => {
    const done = (error, stdout, stderr) => {
      if (error && typeof error.code !== "number") reject(Object.assign(error, { stdout, stderr }));
      else resolve({ stdout, stderr, code: error ? error.code : 0 });
    };
    execFile(path, args, { cwd, env, timeout: 120_000, maxBuffer: 2 ** 26 }, done).stdin.end();
  });
}

/** Return the lines of JSON of a program that must succeed. */
export function lines({ stdout, stderr, code }) {
  assert.equal(code, 0, stdout + stderr);
  return stdout.trim().split("\n").map((line) => JSON.parse(line));
}

/** Return a text that makes the scripted server answer with another one. */
export function say(text) {
  return `<<say>>${text}<<done>>`;
}

/** Return a call as the scripted model writes it. */
export function call(name, args) {
  return `<tool_call>${JSON.stringify({ name, arguments: args })}</tool_call>`;
}
