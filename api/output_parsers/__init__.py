"""Reasoning and tool calls parsed from generated text."""
