"""The style sheet of the page about a run of `make e2e`, for light and dark screens."""

from typing import Final

STYLE: Final = """
:root {
  color-scheme: light dark;
  --ground: #f4f6f8; --paper: #ffffff; --ink: #17212b; --soft: #596877; --line: #e2e7ec;
  --lane: #f1f4f7; --in-bar: #ffffff; --shade: rgba(15, 30, 45, .06);
  --good: #1d7f4e; --good-ground: #e4f4eb; --bad: #c0312b; --bad-ground: #fdeae8;
  --detect: #d64545; --recover: #e9a13b; --quiet: #8fa3b5;
  --a1: #3f74b5; --a2: #8059b5; --a3: #1b93ad; --a4: #98832a; --a5: #b5548f; --a6: #6b7d3a;
  --decide: #b9527c; --terminate: #9568bd; --schedule: #5679c4; --start: #2c97b5;
  --first: #2f9c6e; --again: #a7cf8f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #10161c; --paper: #182029; --ink: #e6ebf0; --soft: #98a7b5; --line: #2a3540;
    --lane: #1f2933; --in-bar: #0e141a; --shade: rgba(0, 0, 0, .3);
    --good: #5fc991; --good-ground: #14301f; --bad: #ff7b72; --bad-ground: #3b1a1a;
    --detect: #f0706a; --recover: #efb456; --quiet: #6d8193;
    --a1: #79a9e0; --a2: #b296e3; --a3: #56c3db; --a4: #cdb85a; --a5: #e28bc0; --a6: #a9bd72;
    --decide: #e07ba6; --terminate: #bd97e3; --schedule: #86a6ea; --start: #5cc0dc;
    --first: #5fcb9b; --again: #77a35f;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 36px 24px 72px; }
header { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 8px 24px; }
header div { flex: 1 1 480px; }
h1 { font-size: 28px; line-height: 1.25; letter-spacing: -.01em; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 0 0 2px; }
p { margin: 2px 0 12px; color: var(--soft); max-width: 96ch; }
code { font: 13px ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.verdict { font-size: 17px; font-weight: 650; padding: 8px 18px; border-radius: 999px; }
.good { color: var(--good); } .bad { color: var(--bad); }
.verdict.good { background: var(--good-ground); } .verdict.bad { background: var(--bad-ground); }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 12px;
  padding: 20px 24px; margin-top: 18px; box-shadow: 0 1px 3px var(--shade); }
section.breaches { border-color: var(--bad); }
section.breaches li { margin: 4px 0; overflow-wrap: anywhere; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px;
  margin-top: 20px; }
.number { background: var(--paper); border: 1px solid var(--line); border-radius: 12px;
  padding: 12px 16px; box-shadow: 0 1px 3px var(--shade); }
.number b { display: block; font-size: 24px; line-height: 1.3; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.number span { color: var(--soft); font-size: 13px; line-height: 1.35; display: block; }
.spent { display: flex; height: 20px; border-radius: 6px; overflow: hidden; margin: 12px 0 8px; }
.spent i { display: block; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; color: var(--soft); font-size: 13px;
  margin: 8px 0 4px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 6px; vertical-align: -1px; }
.wide { overflow-x: auto; } .wide svg { min-width: 940px; } .wide table { min-width: 1040px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 9px 14px 9px 0; border-top: 1px solid var(--line);
  vertical-align: top; }
tr:first-child > th { border-top: 0; }
th { color: var(--soft); font-weight: 600; font-size: 13px; line-height: 1.3; }
td small { display: block; color: var(--soft); font-size: 13px; line-height: 1.4; max-width: 46ch;
  overflow-wrap: anywhere; }
td.name { white-space: nowrap; }
td.right, th.right { text-align: right; white-space: nowrap; }
td:last-child, th:last-child { padding-right: 0; }
td b.badge { display: inline-block; min-width: 22px; height: 22px; border-radius: 11px;
  text-align: center; line-height: 22px; font-size: 12px; color: var(--paper);
  background: var(--detect); }
summary { cursor: pointer; font-weight: 600; }
details table { margin-top: 10px; font-size: 13px; }
svg { display: block; width: 100%; height: auto; margin-top: 6px; }
svg text { fill: var(--ink); font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif;
  dominant-baseline: central; }
svg text.middle { text-anchor: middle; } svg text.end { text-anchor: end; }
svg text.tick { fill: var(--soft); font-size: 11px; }
svg text.in-bar { fill: var(--in-bar); font-size: 11px; font-weight: 600; pointer-events: none; }
svg text.pale { fill: var(--soft); }
svg text.value { font-variant-numeric: tabular-nums; }
.lane { fill: var(--lane); }
.grid { stroke: var(--line); stroke-width: 1; } .axis { stroke: var(--soft); stroke-width: 1; }
.struck { stroke: var(--detect); stroke-width: 1; stroke-dasharray: 3 4; opacity: .75; }
.mark circle { fill: var(--detect); stroke: var(--paper); stroke-width: 1.5; }
.mark text { fill: var(--paper); font-weight: 700; }
.detect { fill: var(--detect); background: var(--detect); }
.recover { fill: var(--recover); background: var(--recover); }
.trains-on { fill: var(--quiet); background: var(--quiet); }
.phase { fill: var(--quiet); }
.phase.running { fill: var(--good); } .phase.completed { fill: var(--good); }
.phase.restarting { fill: var(--recover); } .phase.failed { fill: var(--bad); }
.pod { stroke: var(--paper); stroke-width: 1; }
.pod.spare { fill-opacity: .38; }
.pod.waiting { fill-opacity: .12; stroke: currentColor; stroke-dasharray: 3 2; }
.pod.over { fill-opacity: .3; }
.pod.leaving { fill: url(#hatch); stroke: var(--quiet); }
.hatch-ground { fill: var(--lane); } .hatch-line { fill: var(--quiet); }
.curve { fill: none; stroke: currentColor; stroke-width: 2.2; stroke-linejoin: round; }
.undisturbed { fill: none; stroke: var(--quiet); stroke-width: 5; stroke-opacity: .4;
  stroke-linejoin: round; }
.dot { stroke: none; } svg .again-dot { fill: none; stroke: currentColor; stroke-width: 1.3; }
.resumed { stroke: var(--ink); stroke-width: 1.6; }
.recovered { fill: var(--paper); stroke: var(--ink); stroke-width: 2; }
.stage { stroke: var(--paper); stroke-width: .8; }
.decide { fill: var(--decide); background: var(--decide); }
.terminate { fill: var(--terminate); background: var(--terminate); }
.schedule { fill: var(--schedule); background: var(--schedule); }
.start { fill: var(--start); background: var(--start); }
.firstStep { fill: var(--first); background: var(--first); }
.again { fill: var(--again); background: var(--again); }
.new { background: var(--good); } .rest { background: var(--quiet); }
.a1 { color: var(--a1); fill: var(--a1); background: var(--a1); }
.a2 { color: var(--a2); fill: var(--a2); background: var(--a2); }
.a3 { color: var(--a3); fill: var(--a3); background: var(--a3); }
.a4 { color: var(--a4); fill: var(--a4); background: var(--a4); }
.a5 { color: var(--a5); fill: var(--a5); background: var(--a5); }
.a6 { color: var(--a6); fill: var(--a6); background: var(--a6); }
svg .curve, svg .undisturbed { fill: none; }
"""
