//! Operations that go on when whoever waits for them gives up.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::runtime::Handle;

/// An operation that goes on in a task of its own when its future is dropped after it has begun.
#[must_use = "an operation does nothing until it is awaited"]
pub(crate) struct Detaching<R: Send + 'static> {
    /// None once it has ended.
    operation: Option<Pin<Box<dyn Future<Output = R> + Send>>>,
    begun: bool,
}

impl<R: Send + 'static> Detaching<R> {
    pub fn new(operation: impl Future<Output = R> + Send + 'static) -> Self {
        Self { operation: Some(Box::pin(operation)), begun: false }
    }
}

impl<R: Send + 'static> Future for Detaching<R> {
    type Output = R;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<R> {
        self.begun = true;
        let Some(operation) = &mut self.operation else {
            // It has ended, and was polled again.
            return Poll::Pending;
        };
        let ended = operation.as_mut().poll(cx);
        if ended.is_ready() {
            self.operation = None;
        }
        ended
    }
}

impl<R: Send + 'static> Drop for Detaching<R> {
    fn drop(&mut self) {
        let Some(operation) = self.operation.take().filter(|_| self.begun) else { return };
        match Handle::try_current() {
            // Nobody waits for what comes of it.
            Ok(runtime) => drop(runtime.spawn(async { drop(operation.await) })),
            Err(error) => {
                tracing::warn!(%error, "an operation was given up outside of a runtime, and ends amid")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::sync::oneshot;

    /// An operation that waits, and then says that it has ended.
    fn waits() -> (oneshot::Sender<()>, oneshot::Receiver<()>, Detaching<()>) {
        let (go, wait) = oneshot::channel();
        let (say, said) = oneshot::channel();
        let operation = async move {
            wait.await.expect("it is let go");
            let _ = say.send(());
        };
        (go, said, Detaching::new(operation))
    }

    #[tokio::test]
    async fn what_has_begun_goes_on_when_it_is_given_up_and_what_has_not_does_not() {
        let (go, said, operation) = waits();
        let given_up = tokio::time::timeout(Duration::from_millis(5), operation).await;
        assert!(given_up.is_err(), "nothing has let it go");
        go.send(()).expect("it waits still");
        said.await.expect("it has gone on");

        let (go, said, operation) = waits();
        drop(operation);
        assert!(go.send(()).is_err() && said.await.is_err(), "it never began");

        let (go, said, operation) = waits();
        go.send(()).expect("it is there");
        operation.await;
        said.await.expect("it has ended");
    }

    #[test]
    fn what_is_given_up_outside_of_a_runtime_ends() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let (go, said, mut operation) = waits();
        runtime.block_on(async {
            std::future::poll_fn(|cx| {
                assert!(Pin::new(&mut operation).poll(cx).is_pending());
                Poll::Ready(())
            })
            .await;
        });
        drop(operation);
        assert!(go.send(()).is_err() && runtime.block_on(said).is_err());
    }
}
