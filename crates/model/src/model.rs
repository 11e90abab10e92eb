//! A loaded model and its forward pass.

use std::sync::Arc;
use std::time::Instant;

use metaltail_container::{Checkpoint, ExpertPlace, Inventory};
use metaltail_kernels::{Accelerator, ExpertCompute, Kernels, Pool, rms_norm};
use metaltail_quant::dequantize_row;
use metaltail_store::{ExpertStore, LayerExperts};

use crate::accelerated;
use crate::attention::{self, Attention};
use crate::error::ModelError;
use crate::ffn::{self, Experts, FeedForward, Foresight, Predictor};
use crate::kv::KvCache;
use crate::linear::Linear;
use crate::load::Loader;
use crate::observer::{ModelEvent, ModelObserver};
use crate::plan::{LayerPlan, Plan};
use crate::step::{CancelFlag, Row, Selection, StepContext};

/// One decoder layer with its resident weights.
struct Layer {
    attention_norm: Vec<f32>,
    attention: Box<dyn Attention>,
    ffn_norm: Vec<f32>,
    ffn: Box<dyn FeedForward>,
}

/// The draft layer: joins the next token's embedding with the hidden state, then one more layer.
struct Draft {
    embedding_norm: Vec<f32>,
    hidden_norm: Vec<f32>,
    join: Linear,
    layer: Layer,
    final_norm: Vec<f32>,
}

/// A model whose dense weights are in memory. Experts are fetched from a store at each step.
pub struct Model {
    plan: Plan,
    kernels: Kernels,
    pool: Arc<Pool>,
    embedding: Linear,
    body: Body,
    draft: Option<Draft>,
}

/// Where the dense weights of all layers lie, and so what computes with them.
enum Body {
    Processor { layers: Vec<Layer>, final_norm: Vec<f32>, head: Option<Linear> },
    Accelerator(accelerated::Body),
}

/// How a model is loaded.
pub struct LoadOptions<'a> {
    /// Instruction set to compute with.
    pub kernels: Kernels,
    /// Threads to compute with.
    pub pool: Arc<Pool>,
    /// An accelerator that takes the dense weights, where it can ([`Model::why_not_accelerated`]).
    pub accelerator: Option<&'a mut dyn Accelerator>,
    /// Whether to load the draft layer, where there is a complete one.
    pub draft: bool,
    /// Called with the bytes of each tensor as it is loaded.
    pub progress: &'a dyn Fn(u64),
}

/// Where every routed expert lies, a layer at a time: what an expert store is opened with.
///
/// # Errors
/// Experts that are missing or have another size than the plan says.
pub fn expert_places(
    checkpoint: &Checkpoint,
    inventory: &Inventory,
    draft: bool,
) -> Result<Vec<LayerExperts>, ModelError> {
    let layers = inventory.experts.iter().filter(|spec| draft || !spec.draft);
    layers
        .map(|spec| {
            let experts: Result<Vec<ExpertPlace>, _> =
                (0..spec.count).map(|expert| checkpoint.expert(spec, expert)).collect();
            Ok(LayerExperts { layer: spec.layer, experts: experts? })
        })
        .collect()
}

/// Applies one norm to every row.
fn norm_rows(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    for (row, out) in x.chunks(weight.len()).zip(out.chunks_mut(weight.len())) {
        rms_norm(row, weight, eps, out);
    }
    out
}

impl Layer {
    fn load(
        plan: &LayerPlan,
        index: u32,
        hidden: usize,
        experts: &[LayerExperts],
        loader: &Loader<'_>,
    ) -> Result<Layer, ModelError> {
        let prefix = format!("model.layers.{index}.");
        let places = experts.iter().find(|layer| layer.layer == index);
        let parts = places.map(|layer| ffn::parts_of(&layer.experts));
        Ok(Layer {
            attention_norm: loader.norm(&format!("{prefix}input_layernorm.weight"))?,
            attention: attention::load(&plan.attention, &prefix, loader)?,
            ffn_norm: loader.norm(&format!("{prefix}post_attention_layernorm.weight"))?,
            ffn: ffn::load(&plan.ffn, index, hidden, &prefix, parts, loader)?,
        })
    }

    /// `x ← x + Attn(norm(x)); x ← x + FFN(norm(x))` for all rows. Meanwhile `next`'s experts are guessed.
    fn forward(
        &self,
        cx: &mut StepContext<'_, '_>,
        experts: &mut Experts<'_>,
        slot: usize,
        (eps, next): (f32, Option<&Layer>),
        x: &mut [f32],
    ) -> Result<(), ModelError> {
        let mut out = vec![0.0; x.len()];
        let normed = norm_rows(x, &self.attention_norm, eps);
        self.attention.forward(cx, slot, &normed, &mut out)?;
        x.iter_mut().zip(&out).for_each(|(x, out)| *x += out);
        let normed = norm_rows(x, &self.ffn_norm, eps);
        let mut ahead = |store: &ExpertStore, foresight: &mut Foresight| {
            guess(next, cx, (store, foresight), Predictor::BeforeExperts, eps, x);
        };
        self.ffn.forward(cx, experts, &normed, &mut out, &mut ahead)?;
        x.iter_mut().zip(&out).for_each(|(x, out)| *x += out);
        guess(next, cx, (experts.store, &mut experts.foresight), Predictor::LayerOutput, eps, x);
        Ok(())
    }
}

/// Guesses what the next layer will choose, from the residual stream as it is now.
fn guess(
    next: Option<&Layer>,
    cx: &StepContext<'_, '_>,
    (store, foresight): (&ExpertStore, &mut Foresight),
    predictor: Predictor,
    eps: f32,
    x: &[f32],
) {
    let Some(next) = next.filter(|_| foresight.wants(cx.rows.len())) else { return };
    let normed = norm_rows(x, &next.ffn_norm, eps);
    if let Some((layer, experts)) = next.ffn.foresee(cx, &normed) {
        foresight.expect(store, layer, predictor, experts);
    }
}

impl Model {
    /// Loads the dense weights of a plan; `experts` are the places the store was opened with.
    ///
    /// # Errors
    /// Tensors that are missing, ill-sized or unreadable.
    pub fn load(
        checkpoint: &Checkpoint,
        plan: Plan,
        experts: &[LayerExperts],
        options: LoadOptions<'_>,
    ) -> Result<Model, ModelError> {
        let inventory = plan.inventory();
        let loader = Loader::new(checkpoint, &inventory, plan.norms, options.progress);
        let draft = match &plan.draft {
            Some(draft) if options.draft => Some(Draft::load(draft, &plan, experts, &loader)?),
            _ => None,
        };
        let body = match options.accelerator {
            Some(device) => Body::Accelerator(accelerated::Body::load(&plan, experts, &loader, device)?),
            None => Body::on_processor(&plan, experts, &loader)?,
        };
        Ok(Model {
            kernels: options.kernels,
            pool: options.pool.clone(),
            embedding: Linear::load("model.embed_tokens.weight", &loader)?,
            body,
            draft,
            plan,
        })
    }

    /// Why an accelerator cannot take the dense weights of a plan; `None` where it can.
    pub fn why_not_accelerated(plan: &Plan) -> Option<&'static str> {
        accelerated::unsupported(plan)
    }

    /// Why an accelerator cannot compute the experts of a plan, and so nothing of it; `None` where it can.
    pub fn experts_need_the_processor(plan: &Plan) -> Option<&'static str> {
        accelerated::unsupported_experts(plan)
    }

    /// The plan it was loaded from.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Whether the draft layer was loaded.
    pub fn has_draft(&self) -> bool {
        self.draft.is_some()
    }

    /// Computes one step: rows of one or more sequences, positions of each ascending and next
    /// after what its cache holds. Returns hidden states after the final norm, rows × hidden.
    ///
    /// # Errors
    /// Ids outside the vocabulary, experts that cannot be had, cancellation; with recurrent layers, rows
    /// that do not follow what a cache holds. After an error the caches are as they were before.
    pub fn forward(
        &self,
        rows: &[Row],
        caches: &mut [&mut KvCache],
        experts: &mut Experts<'_>,
        observer: &dyn ModelObserver,
        cancel: &CancelFlag,
    ) -> Result<Vec<f32>, ModelError> {
        caches.iter().enumerate().try_for_each(|(sequence, cache)| cache.check(sequence, rows))?;
        let mut x = vec![0.0; rows.len() * self.plan.hidden];
        for (row, x) in rows.iter().zip(x.chunks_mut(self.plan.hidden)) {
            self.embed(row.token, x)?;
        }
        let hidden = match &self.body {
            Body::Processor { layers, final_norm, .. } => {
                let mut cx = self.context(rows, caches, observer);
                self.layers(&mut cx, layers, experts, cancel, &mut x)?;
                norm_rows(&x, final_norm, self.plan.norm_eps)
            }
            Body::Accelerator(body) => body.forward((rows, &x), caches, experts, observer, cancel)?,
        };
        commit(rows, caches);
        Ok(hidden)
    }

    /// All layers on the processor.
    fn layers(
        &self,
        cx: &mut StepContext<'_, '_>,
        layers: &[Layer],
        experts: &mut Experts<'_>,
        cancel: &CancelFlag,
        x: &mut [f32],
    ) -> Result<(), ModelError> {
        for (slot, layer) in layers.iter().enumerate() {
            cancel.check()?;
            let (next, began) = (layers.get(slot + 1), Instant::now());
            layer.forward(cx, experts, slot, (self.plan.norm_eps, next), x)?;
            if self.plan.layers[slot].moe().is_some() {
                let event = ModelEvent::SparseLayer { layer: slot as u32, took: began.elapsed() };
                cx.observer.on_model(&event);
            }
        }
        Ok(())
    }

    /// One draft step: row `i` holds the token after the one whose final-normed hidden state is
    /// row `i` of `hidden`; `caches` belong to the draft layer. Returns hidden states for
    /// [`Model::logits`], rows × hidden.
    ///
    /// # Errors
    /// As [`Model::forward`]; [`ModelError::NoDraft`] if the draft layer was not loaded.
    pub fn draft_forward(
        &self,
        rows: &[Row],
        hidden: &[f32],
        caches: &mut [&mut KvCache],
        experts: &mut Experts<'_>,
        observer: &dyn ModelObserver,
    ) -> Result<Vec<f32>, ModelError> {
        let draft = self.draft.as_ref().ok_or(ModelError::NoDraft)?;
        caches.iter().enumerate().try_for_each(|(sequence, cache)| cache.check(sequence, rows))?;
        let width = self.plan.hidden;
        let eps = self.plan.norm_eps;
        let mut joined = vec![0.0; rows.len() * 2 * width];
        for ((row, hidden), out) in rows.iter().zip(hidden.chunks(width)).zip(joined.chunks_mut(2 * width)) {
            let mut embedded = vec![0.0; width];
            self.embed(row.token, &mut embedded)?;
            let (first, second) = out.split_at_mut(width);
            rms_norm(&embedded, &draft.embedding_norm, eps, first);
            rms_norm(hidden, &draft.hidden_norm, eps, second);
        }
        let mut x = draft.join.forward(self.kernels, &self.pool, &joined, rows.len());
        let mut cx = self.context(rows, caches, observer);
        draft.layer.forward(&mut cx, experts, 0, (eps, None), &mut x)?;
        commit(rows, caches);
        Ok(norm_rows(&x, &draft.final_norm, eps))
    }

    /// Logits of hidden states: `n × vocabulary`.
    ///
    /// # Errors
    /// A failure of the accelerator that has the head.
    pub fn logits(&self, hidden: &[f32], compute: &mut dyn ExpertCompute) -> Result<Vec<f32>, ModelError> {
        match &self.body {
            Body::Processor { head, .. } => {
                let head = head.as_ref().unwrap_or(&self.embedding);
                Ok(head.forward(self.kernels, &self.pool, hidden, hidden.len() / self.plan.hidden))
            }
            Body::Accelerator(body) => body.logits(hidden, compute),
        }
    }

    fn embed(&self, token: u32, out: &mut [f32]) -> Result<(), ModelError> {
        let vocab = self.plan.vocab;
        if token as usize >= vocab {
            return Err(ModelError::TokenOutOfRange { id: token, vocab });
        }
        dequantize_row(self.embedding.view(), token as usize, out);
        Ok(())
    }

    fn context<'a, 'k>(
        &'a self,
        rows: &'a [Row],
        caches: &'a mut [&'k mut KvCache],
        observer: &'a dyn ModelObserver,
    ) -> StepContext<'a, 'k> {
        StepContext {
            rows,
            caches,
            selections: vec![Selection::All; rows.len()],
            pool: &self.pool,
            kernels: self.kernels,
            observer,
        }
    }
}

impl Body {
    fn on_processor(plan: &Plan, experts: &[LayerExperts], loader: &Loader<'_>) -> Result<Body, ModelError> {
        let layer = |(index, layer): (usize, &LayerPlan)| {
            Layer::load(layer, index as u32, plan.hidden, experts, loader)
        };
        let head = match plan.tied_head {
            true => None,
            false => Some(Linear::load("lm_head.weight", loader)?),
        };
        Ok(Body::Processor {
            layers: plan.layers.iter().enumerate().map(layer).collect::<Result<Vec<_>, _>>()?,
            final_norm: loader.norm("model.norm.weight")?,
            head,
        })
    }
}

impl Draft {
    fn load(
        draft: &LayerPlan,
        plan: &Plan,
        experts: &[LayerExperts],
        loader: &Loader<'_>,
    ) -> Result<Draft, ModelError> {
        let index = plan.layers.len() as u32;
        let norm = |name: &str| loader.norm(&format!("model.layers.{index}.{name}.weight"));
        Ok(Draft {
            embedding_norm: norm("enorm")?,
            hidden_norm: norm("hnorm")?,
            join: Linear::load(&format!("model.layers.{index}.eh_proj.weight"), loader)?,
            layer: Layer::load(draft, index, plan.hidden, experts, loader)?,
            final_norm: norm("shared_head.norm")?,
        })
    }
}

/// The rows are part of their sequences from now on.
fn commit(rows: &[Row], caches: &mut [&mut KvCache]) {
    caches.iter_mut().enumerate().for_each(|(sequence, cache)| cache.commit(sequence, rows));
}
