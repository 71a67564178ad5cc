// The live page in a panel. It is the server's own, in a frame: nothing of it is made here.
import * as vscode from "vscode";

let panel: vscode.WebviewPanel | undefined;

export function isPageOpen(): boolean {
  return panel !== undefined;
}

export function showPage(address: vscode.Uri): void {
  if (panel === undefined) {
    panel = vscode.window.createWebviewPanel(
      "slipstream",
      "slipstream",
      { viewColumn: vscode.ViewColumn.Beside, preserveFocus: true },
      { enableScripts: true, retainContextWhenHidden: true },
    );
    panel.onDidDispose(() => {
      panel = undefined;
    });
  }
  panel.webview.html = framed(address.toString(true), `${address.scheme}://${address.authority}`);
  panel.reveal(undefined, true);
}

function framed(address: string, origin: string): string {
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; frame-src ${origin}; style-src 'unsafe-inline'">
<style>
html, body, iframe { border: 0; height: 100%; margin: 0; overflow: hidden; padding: 0; width: 100% }
iframe { display: block }
</style>
</head>
<body><iframe src="${address}" title="slipstream"></iframe></body>
</html>`;
}
