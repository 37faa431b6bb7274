"""Turns a checked request into events, the same way for every protocol: chat, completions, responses, messages, TGI."""
