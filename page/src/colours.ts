// The colours canvases draw with; those of the document's own text are in page.css.

export interface Colours {
  paper: string;
  ink: string;
  faint: string;
  line: string;
  raised: string;
  accent: string;
  critical: string;
  level: string[];
  phases: string[];
  families: string[];
  roles: Record<string, string>;
}

const LIGHT: Colours = {
  paper: "#ffffff",
  ink: "#1b1c20",
  faint: "#5d6069",
  line: "#dfe1e6",
  raised: "#f5f6f8",
  accent: "#0b5fc0",
  critical: "#c2410c",
  level: ["#d5d9e2", "#e2e5eb", "#eaecf1", "#eff1f4"],
  phases: ["#dfe1e6", "#a9b6cf", "#6f81a5", "#c8a9bd"],
  families: [
    "#8db7ea",
    "#74c7bb",
    "#c5a9ea",
    "#ecc477",
    "#b6d486",
    "#eda595",
    "#c3c7cf",
    "#e6a4cd",
    "#ee8f62",
    "#d9dce3",
  ],
  roles: {
    parameter: "#8db7ea",
    gradient: "#ecc477",
    optimizer: "#e6a4cd",
    activation: "#93cf9b",
    temporary: "#b9bec8",
    input: "#74c7bb",
    buffer: "#c5a9ea",
    other: "#d9dce3",
  },
};

const DARK: Colours = {
  paper: "#16171a",
  ink: "#ececf0",
  faint: "#9fa2ac",
  line: "#34363d",
  raised: "#1e2024",
  accent: "#6db3ff",
  critical: "#ff8a4c",
  level: ["#3a3e48", "#31343c", "#2a2d34", "#25272d"],
  phases: ["#3a3d45", "#556789", "#7f95c2", "#7d5a70"],
  families: [
    "#2f66a8",
    "#1f7a70",
    "#6f4fa8",
    "#8c6516",
    "#557a25",
    "#9c4a3a",
    "#565a64",
    "#954178",
    "#b4531f",
    "#41444c",
  ],
  roles: {
    parameter: "#3a76bd",
    gradient: "#a87a1d",
    optimizer: "#a34f87",
    activation: "#3d8a4a",
    temporary: "#666b76",
    input: "#2a8a80",
    buffer: "#7d5cb8",
    other: "#4a4e57",
  },
};

export function colours(dark: boolean): Colours {
  return dark ? DARK : LIGHT;
}

/** One colour per family of `names`, or per role. */
export function roleColour(palette: Colours, role: string): string {
  return palette.roles[role] ?? palette.roles.other;
}
