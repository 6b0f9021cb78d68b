"""The pictures of an audit."""
