"""What the figures of reports and of reproduced results share: style, panels, marks and labels."""
