"""Carries decisions out: reads what no watch brings, decides, writes, reports."""
