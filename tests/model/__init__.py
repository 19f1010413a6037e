"""The protocol of cpp/reducer as a state machine, searched exhaustively; see docs/design/testing.md."""
