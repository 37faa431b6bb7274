"""From a checked request to events, the same for every protocol: chat, completions, responses, messages, TGI."""
