"""Turns a checked request into events, the same for every protocol: chat, completions, responses, messages, TGI."""
