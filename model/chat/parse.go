package chat

// Mode says what the parser does with defects.
type Mode uint8

// Strict accepts only the template's own format and reports every defect as Malformed. Lenient repairs the slips that models make
// (a missing </parameter>, a missing <tool_call> or </tool_call>, a call inside the thinking block, a JSON body) and reports them as
// Repaired.
const (
	Strict Mode = iota
	Lenient
)

// EventType is the type of a parser event.
type EventType uint8

// Event types.
const (
	Thinking  EventType = iota // Text is a piece of the thinking block
	Content                    // Text is a piece of the answer
	CallEvent                  // Call is a complete tool call
	Malformed                  // Reason names a defect; Text is the text that was dropped, if any
	Repaired                   // Reason names a defect that Lenient repaired
)

// Event is one result of parsing.
type Event struct {
	Type   EventType
	Text   string
	Call   Call
	Reason string
}

// Turn is a completely parsed turn. Thinking and Content are trimmed.
type Turn struct {
	Thinking, Content string
	Calls             []Call
	Malformed         []string
	Repairs           []string
}
