// Package chat renders conversations to the text of the Qwen3.5 chat template and parses what a model answers.
//
// Renderer.Open renders a whole conversation byte for byte as the published template does (model.md 5.5). Renderer.Bridge renders only
// what follows sampled tokens, so that a multi-turn episode is one append-only ledger of ids and sampled tokens are never rebuilt from
// text (model.md 5.6). Both return segments that name the provenance of every character. Parser turns the sampled text, as it streams,
// into thinking, content, tool calls and named defects. FromCheckpoint tells whether a checkpoint has a published template, which the
// package's own code renders, another one that a Jinja engine renders, or one that cannot be used.
//
// The package is a leaf: it must never know a tokenizer's vocabulary (it sees the Encoder interface), a model, an environment or a
// training method. It trusts no message: literals such as <|im_end|> inside message text stay ordinary text.
//
// Start with Renderer and Parser.
package chat
