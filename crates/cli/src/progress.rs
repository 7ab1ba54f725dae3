//! Progress of long work: a bar on a terminal, nothing elsewhere.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

use crate::control::Progress;

/// Shows how far long work is.
pub(crate) struct Bar {
    bar: Option<ProgressBar>,
    stage: String,
}

impl Bar {
    /// A bar on standard error, if that is a terminal.
    pub(crate) fn new() -> Bar {
        Bar { bar: std::io::stderr().is_terminal().then(ProgressBar::new_spinner), stage: String::new() }
    }

    /// Shows `now`.
    pub(crate) fn show(&mut self, now: &Progress) {
        let Some(bar) = &self.bar else { return };
        if self.stage != now.stage {
            self.stage.clone_from(&now.stage);
            let template = match now.total {
                Some(_) => "{msg:24} [{bar:32}] {human_pos}/{human_len} {eta}",
                None => "{msg:24} {spinner} {human_pos}",
            };
            bar.set_style(
                ProgressStyle::with_template(template).expect("the template is valid").progress_chars("=> "),
            );
            bar.set_message(now.stage.clone());
            bar.reset_eta();
        }
        match now.total {
            Some(total) => bar.set_length(total),
            None => bar.unset_length(),
        }
        bar.set_position(now.done);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
