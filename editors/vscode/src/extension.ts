// Starts the language server and asks for what an editor cannot: numbers and names.
import * as vscode from "vscode";
import { LanguageClient } from "vscode-languageclient/node";
import { isPageOpen, showPage } from "./page";

let client: LanguageClient | undefined;

export async function activate(context: vscode.ExtensionContext): Promise<void> {
  const commands: [string, () => Promise<void>][] = [
    ["slipstream.chooseBatchSize", chooseBatchSize],
    ["slipstream.chooseTechnique", chooseTechnique],
    ["slipstream.takeBack", takeBack],
    ["slipstream.openPage", openPage],
    ["slipstream.restart", restart],
  ];
  for (const [name, run] of commands) {
    context.subscriptions.push(vscode.commands.registerCommand(name, run));
  }
  context.subscriptions.push(
    vscode.workspace.onDidChangeConfiguration(async (change) => {
      if (change.affectsConfiguration("slipstream")) await restart();
    }),
  );
  await start();
}

export async function deactivate(): Promise<void> {
  await client?.stop();
}

function settings(): { command: string; workload: string; more: string[] } {
  const found = vscode.workspace.getConfiguration("slipstream");
  return {
    command: found.get<string>("command") || "slipstream",
    workload: found.get<string>("workload") || "",
    more: found.get<string[]>("arguments") ?? [],
  };
}

function folder(): string | undefined {
  return vscode.workspace.workspaceFolders?.[0]?.uri.fsPath;
}

async function start(): Promise<void> {
  const { command, workload, more } = settings();
  const server = {
    command,
    args: ["lsp", ...(workload ? [workload] : []), ...more],
    options: { cwd: folder() },
  };
  client = new LanguageClient("slipstream", "slipstream", server, {
    documentSelector: [{ scheme: "file", language: "python" }],
    middleware: {
      // A click above a function; other editors have the server open a browser.
      executeCommand: (name, given, next) =>
        name === "slipstream.page" ? openPage() : next(name, given),
    },
  });
  try {
    await client.start();
  } catch {
    client = undefined;
    void sayHowToStart(command); // not awaited
  }
}

/** The client itself has said why it failed. */
async function sayHowToStart(command: string): Promise<void> {
  const open = "Open Settings";
  const chosen = await vscode.window.showErrorMessage(
    `'${command}' does not start. Install it with pip install 'slipstream[live]', ` +
      "or name it in slipstream.command.",
    open,
  );
  if (chosen === open) {
    await vscode.commands.executeCommand("workbench.action.openSettings", "slipstream.command");
  }
}

async function restart(): Promise<void> {
  await client?.stop();
  client = undefined;
  await start();
  // A new server serves the page at a new address.
  if (client !== undefined && isPageOpen()) await openPage();
}

/** Asks the server about the open file; its answer to an impossible wish is a sentence. */
async function ask<T>(command: string, ...more: unknown[]): Promise<T | undefined> {
  const editor = vscode.window.activeTextEditor ?? vscode.window.visibleTextEditors.find(isPython);
  if (client === undefined) {
    void vscode.window.showWarningMessage("slipstream's server does not run; restart it.");
  } else if (editor === undefined || !isPython(editor)) {
    void vscode.window.showWarningMessage("Open the workload's Python file first.");
  } else {
    try {
      return await client.sendRequest<T>("workspace/executeCommand", {
        command,
        arguments: [editor.document.uri.toString(), ...more],
      });
    } catch (error) {
      void vscode.window.showWarningMessage(error instanceof Error ? error.message : String(error));
    }
  }
  return undefined;
}

function isPython(editor: vscode.TextEditor): boolean {
  return editor.document.languageId === "python";
}

async function chooseBatchSize(): Promise<void> {
  const text = await vscode.window.showInputBox({
    prompt: "Samples per step",
    validateInput: (value) => (/^[1-9][0-9]*$/.test(value) ? undefined : "An integer"),
  });
  if (text !== undefined) await ask("slipstream.setBatchSize", Number(text));
}

async function chooseTechnique(): Promise<void> {
  const text = await vscode.window.showInputBox({
    prompt: "A technique, or a combination",
    placeHolder: "channels_last, fused_optimizer, amp:bf16+compile",
  });
  if (text) await ask("slipstream.apply", text);
}

async function takeBack(): Promise<void> {
  await ask("slipstream.undo");
}

/** Beside the code: of the same analyses that are shown in it. */
async function openPage(): Promise<void> {
  const found = await ask<{ address: string }>("slipstream.page", false);
  if (found !== undefined) showPage(vscode.Uri.parse(found.address, true));
}
